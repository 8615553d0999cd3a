// Two curves over the steps of a training: the loss, from 0 up, and the share that is read correctly, from 0 to 1.

/** At most `count` points of a curve, each the mean of its share of the values. */
function thinned(values, count) {
  const size = Math.max(1, Math.ceil(values.length / count));
  const points = [];
  for (let start = 0; start < values.length; start += size) {
    const share = values.slice(start, start + size);
    points.push([start + share.length / 2, share.reduce((sum, value) => sum + value, 0) / share.length]);
  }
  return points;
}

/**
 * Draws into a canvas, in the colors that `--accent` and `--warm` have there.
 *
 * @param losses of each step.
 * @param shares pairs of a step and the share after it.
 */
export function drawCurves(canvas, losses, shares) {
  const ratio = devicePixelRatio;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  const color = (name) => getComputedStyle(canvas).getPropertyValue(name);
  const margin = 8 * ratio;
  const points = thinned(losses, width / (2 * ratio));
  const most = Math.max(2.5, ...points.map(([, loss]) => loss));
  const last = Math.max(1, losses.length);
  const at = (step, share) => [margin + (step / last) * (width - 2 * margin), height - margin - share * (height - 2 * margin)];
  pen.lineWidth = ratio;
  pen.strokeStyle = color("--line");
  for (const share of [0, 0.5, 1]) {
    pen.beginPath();
    pen.moveTo(...at(0, share));
    pen.lineTo(...at(last, share));
    pen.stroke();
  }
  pen.lineWidth = 2 * ratio;
  pen.lineJoin = pen.lineCap = "round";
  const curves = [["--accent", points.map(([step, loss]) => at(step, loss / most))], ["--warm", shares.map(([step, share]) => at(step, share))]];
  for (const [name, places] of curves) {
    pen.strokeStyle = color(name);
    pen.beginPath();
    for (const place of places) pen.lineTo(...place);
    pen.stroke();
  }
}

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
 * Draws into a canvas.
 *
 * @param losses of each step.
 * @param shares pairs of a step and the share after it.
 * @param colors of the two, as the page has them now: a canvas does not know `light-dark`.
 */
export function drawCurves(canvas, losses, shares, colors) {
  const ratio = devicePixelRatio;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  const margin = 8 * ratio;
  const points = thinned(losses, width / (2 * ratio));
  const most = Math.max(2.5, ...points.map(([, loss]) => loss));
  const last = Math.max(1, losses.length);
  const at = (step, share) => [margin + (step / last) * (width - 2 * margin), height - margin - share * (height - 2 * margin)];
  pen.lineWidth = ratio;
  pen.strokeStyle = getComputedStyle(canvas).borderTopColor;
  for (const share of [0, 0.5, 1]) {
    pen.beginPath();
    pen.moveTo(...at(0, share));
    pen.lineTo(...at(last, share));
    pen.stroke();
  }
  pen.lineWidth = 2 * ratio;
  pen.lineJoin = pen.lineCap = "round";
  const curves = [points.map(([step, loss]) => [step, loss / most]), shares];
  curves.forEach((curve, k) => {
    pen.strokeStyle = colors[k];
    pen.beginPath();
    for (const [step, share] of curve) pen.lineTo(...at(step, share));
    pen.stroke();
  });
}

// Two curves over the steps of a training: the loss, from 0 up, and the share that is read correctly, from 0 to 1.

const SPACE = { left: 34, right: 48, top: 26, bottom: 36 }; // pixels around the curves, for the axes' labels

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

/** Round numbers from 0 to a largest one, at most five steps apart. */
function ticks(largest) {
  const power = 10 ** Math.floor(Math.log10(largest / 5));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power * 5 >= largest);
  return Array.from({ length: Math.floor(largest / step) + 1 }, (_, k) => k * step);
}

function element(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.textContent = text;
  return made;
}

/**
 * Draws the curves and their axes: steps below, the loss on the left, the share on the right.
 *
 * @param picture an SVG element, whose size on the page stays.
 * @param losses of each step.
 * @param shares pairs of a step and the share after it.
 */
export function drawCurves(picture, losses, shares) {
  const { width, height } = picture.getBoundingClientRect();
  const { left, right, top, bottom } = SPACE;
  const points = thinned(losses, width / 2);
  const most = Math.ceil(Math.max(2, ...points.map(([, loss]) => loss)));
  const last = Math.max(10, losses.length);
  const x = (step) => left + (step / last) * (width - left - right);
  const y = (share) => height - bottom - share * (height - top - bottom);
  const label = (kind, at, text, anchor) => element("text", { class: kind, x: at[0], y: at[1], "text-anchor": anchor }, text);
  const curve = (kind, all) => element("polyline", { class: kind, points: all.map((place) => place.join()).join(" ") });
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.replaceChildren(
    ...[0, 0.5, 1].flatMap((share) => [
      element("line", { x1: x(0), x2: x(last), y1: y(share), y2: y(share) }),
      label("loss", [left - 8, y(share) + 4], String(share * most), "end"),
      label("share", [width - right + 8, y(share) + 4], `${100 * share} %`, "start"),
    ]),
    ...ticks(last).flatMap((step) => [
      element("line", { x1: x(step), x2: x(step), y1: y(0), y2: y(0) + 5 }),
      label("step", [x(step), height - bottom + 18], String(step), "middle"),
    ]),
    label("loss", [0, 12], "loss", "start"),
    label("share", [width, 12], "read correctly", "end"),
    label("step", [(x(0) + x(last)) / 2, height - 3], "steps", "middle"),
    curve("loss", points.map(([step, loss]) => [x(step), y(loss / most)])),
    curve("share", shares.map(([step, share]) => [x(step), y(share)])),
  );
}

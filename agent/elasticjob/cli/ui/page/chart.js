// A line chart of one number over time.

import { el } from "./dom.js";
import { clock, number } from "./format.js";

const HEIGHT = 110, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 22;

// Return a figure. `points`: [time, value], oldest first; `faults`: times; `width`: pixels.
export function chart(title, points, faults, width) {
  const values = points.map(([, value]) => value);
  const low = Math.min(...values), high = Math.max(...values);
  const from = points[0][0], to = Math.max(points[points.length - 1][0], from + 1);
  const pad = (high - low) * 0.1 || Math.abs(high) * 0.1 || 1;
  const bottom = low - pad, top = high + pad;
  const x = (time) => LEFT + ((width - LEFT - RIGHT) * (time - from)) / (to - from);
  const y = (value) => TOP + ((HEIGHT - TOP - BOTTOM) * (top - value)) / (top - bottom);
  const last = values[values.length - 1];
  const path = points.map(([time, value], index) => `${index ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const labels = high === low ? [high] : [high, low];
  const said = `${title}: now ${number(last)}, between ${number(low)} and ${number(high)} since ${clock(from)}`;
  return el("figure", { key: title },
    el("figcaption", {}, el("strong", {}, title), ` ${number(last)}`),
    el("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": said },
      labels.map((value) => [
        el("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
        el("text", { x: LEFT - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, number(value)),
      ]),
      faults.filter((time) => time >= from && time <= to).map((time) => [
        el("line", { x1: x(time), x2: x(time), y1: TOP, y2: HEIGHT - BOTTOM, class: "fault" }, el("title", {}, `fault at ${clock(time)}`)),
        el("text", { x: x(time), y: TOP + 1, class: "faultmark", "text-anchor": "middle" }, "✕"),
      ]),
      el("path", { d: path, class: "curve" }),
      el("circle", { cx: x(points[points.length - 1][0]), cy: y(last), r: 3, class: "dot" }),
      el("text", { x: LEFT, y: HEIGHT - 5, class: "tick" }, clock(from)),
      el("text", { x: width - RIGHT, y: HEIGHT - 5, class: "tick", "text-anchor": "end" }, clock(to)),
    ));
}

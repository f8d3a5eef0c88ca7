// A job's time line as a picture. The tables below it say the same in words.

import { el } from "./dom.js";
import { clock, duration, plural } from "./format.js";

const LEFT = 150, ROW = 26, BAR = 14, TOP = 22;
const MOST_LANES = 24;
const NARROW = 560;

// Return the picture. `from`, `to`: Unix seconds; `width`: pixels.
export function timeline(view, from, to, width) {
  const narrow = width < NARROW;
  const left = narrow ? 8 : LEFT;
  const inner = Math.max(60, width - left - 12);
  const x = (time) => left + (inner * (Math.min(Math.max(time, from), to) - from)) / (to - from);
  const inside = (start, end) => (end ?? to) >= from && (start ?? from) <= to;
  const lanes = view.lanes.filter((lane) => inside(lane.start, lane.end));
  const shown = lanes.slice(0, MOST_LANES);
  const row = narrow ? ROW + 14 : ROW;
  const offset = narrow ? 16 : 0;
  const y = (lane) => TOP + row * lane + offset;
  const height = TOP + row * (shown.length + 1) + 26;
  const name = (text, lane) => el("text", {
    x: narrow ? left : left - 10, y: narrow ? y(lane) - 5 : y(lane) + BAR - 3, class: "lane", "text-anchor": narrow ? "start" : "end",
  }, text);
  const parts = [axis(from, to, x, height, inner), name("rounds", 0)];
  for (const round of view.rounds.filter((r) => inside(r.start, r.end))) {
    const start = x(round.start), end = x(round.end ?? to);
    const bar = Math.max(2, end - start);
    parts.push(el("rect", { key: `r${round.number}`, x: start, y: y(0), width: bar, height: BAR, class: `round ${round.how}` },
      el("title", {}, roundText(round))));
    if (bar > 9 * String(round.number).length + 8) {
      parts.push(el("text", { key: `n${round.number}`, x: start + bar / 2, y: y(0) + 11, class: "inside", "text-anchor": "middle" }, round.number));
    }
  }
  for (const [index, recovery] of view.recoveries.entries()) {
    if (!inside(recovery.start, recovery.end)) continue;
    parts.push(el("rect", {
      key: `v${index}`, x: x(recovery.start), y: y(0) + BAR + 1, width: Math.max(3, x(recovery.end) - x(recovery.start)), height: 4, class: "recovery",
    }, el("title", {}, `recovery ${duration(recovery.end - recovery.start)}: ${recovery.phases.map((p) => `${p.name} ${p.seconds} s`).join(", ")}`)));
  }
  const at = new Map(shown.map((lane, index) => [lane.pod, index + 1]));
  for (const [index, lane] of shown.entries()) {
    const start = x(lane.start ?? from), end = x(lane.end ?? to);
    parts.push(name(short(lane.pod, narrow ? 40 : 21), index + 1));
    parts.push(el("rect", {
      key: `p${lane.pod}`, x: start, y: y(index + 1), width: Math.max(2, end - start), height: BAR,
      class: `pod ${lane.end !== undefined ? "gone" : lane.state === "Running" || lane.state === "Succeeded" ? "up" : "waiting"}`,
    }, el("title", {}, `${lane.pod} on Node ${lane.node ?? "-"}: ${lane.state}`)));
    if (lane.node && end - start > 8 * lane.node.length + 12) {
      parts.push(el("text", { key: `q${lane.pod}`, x: start + 6, y: y(index + 1) + 11, class: "inside" }, lane.node));
    }
  }
  for (const [index, change] of view.changes.entries()) {
    if (!inside(change.time, change.time)) continue;
    parts.push(el("path", { key: `c${index}`, d: diamond(x(change.time), y(0) - 5), class: "change" },
      el("title", {}, `${clock(change.time)} ${change.reason}: ${change.message ?? ""}`)));
  }
  for (const [index, fault] of view.faults.entries()) {
    if (!inside(fault.time, fault.time)) continue;
    const lane = at.get(fault.pod) ?? 0;
    parts.push(el("line", { key: `l${index}`, x1: x(fault.time), x2: x(fault.time), y1: y(0), y2: y(lane) + BAR, class: "fault" }));
    parts.push(el("path", { key: `f${index}`, d: cross(x(fault.time), y(lane) + BAR / 2), class: "fault" },
      el("title", {}, `${clock(fault.time)} ${fault.what}`)));
  }
  return [
    el("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(view, lanes) }, parts),
    lanes.length > shown.length ? el("p", { class: "quiet" }, `${plural(lanes.length - shown.length, "more pod")} in the table of pods`) : null,
  ];
}

export function roundText(round) {
  const length = round.end === undefined ? "" : `, ${duration(round.end - round.start)}`;
  return `round ${round.number}: ${plural(round.workers ?? 0, "worker")} on ${plural(round.pods ?? 0, "pod")}${length}; ${endText(round)}`;
}

export function endText(round) {
  const because = round.cause ? `: ${round.cause}` : "";
  return { training: "trains", ended: "the job ended", fault: `a fault ended it${because}`, planned: `a planned end${because}` }[round.how];
}

function summary(view, lanes) {
  return `Time line: ${plural(view.rounds.length, "round")}, ${plural(view.faults.length, "fault")}, ${plural(lanes.length, "worker pod")}.`
    + " The tables Rounds, Faults and Pods have the same in words.";
}

function axis(from, to, x, height, inner) {
  const span = to - from;
  const wanted = Math.max(2, Math.floor(inner / 130));
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 604800];
  const step = steps.find((size) => span / size <= wanted) ?? span / wanted;
  const ticks = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
    ticks.push(el("line", { key: `a${time}`, x1: x(time), x2: x(time), y1: TOP - 8, y2: height - 18, class: "grid" }));
    const anchor = x(time) > x(to) - 30 ? "end" : x(time) < x(from) + 30 ? "start" : "middle";
    ticks.push(el("text", { key: `b${time}`, x: x(time), y: height - 4, class: "tick", "text-anchor": anchor }, tick(time, step)));
  }
  return ticks;
}

function tick(time, step) {
  if (step >= 86400) return new Date(time * 1000).toLocaleDateString([], { month: "short", day: "numeric" });
  return step < 60 ? clock(time) : clock(time).slice(0, 5);
}

function short(text, most) {
  return text.length > most ? `…${text.slice(1 - most)}` : text;
}

function diamond(x, y) {
  return `M${x} ${y - 5}l5 5l-5 5l-5 -5z`;
}

function cross(x, y) {
  return `M${x - 5} ${y - 5}l10 10M${x + 5} ${y - 5}l-10 10`;
}

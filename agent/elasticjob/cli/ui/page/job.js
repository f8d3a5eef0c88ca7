// One job.

import { chart } from "./chart.js";
import { el } from "./dom.js";
import { ago, bytes, clock, duration, number, plural, ranks } from "./format.js";
import { badge, facts, section, table } from "./parts.js";
import { endText, timeline } from "./timeline.js";

const MOST_CHARTS = 6;
const SPANS = [["auto", "all, or the last hour"], ["600", "last 10 minutes"], ["3600", "last hour"], ["all", "all that is known"]];
const GOOD = new Set(["RendezvousReady", "Running", "FullyScaled", "Complete", "SuccessCriteriaMet"]);

// Return the page. `state`: what the reader chose: {span, stacks, width, choose, ask}.
export function jobPage(view, state) {
  const { job, now } = view;
  return [
    el("p", { key: "back" }, el("a", { href: "#/" }, "All jobs")),
    el("h1", { key: "title", tabindex: "-1", id: "title" }, `${job.namespace}/${job.name} `, badge(job.phase)),
    overview(job, now),
    causes(view.causes),
    line(view, state),
    charts(view, state.width),
    pods(view),
    rounds(view.timeline, now),
    failures(job.failures ?? [], now),
    stacks(view, state.stacks, state.ask),
    conditions(job.conditions ?? [], now),
    events(view.events, now, view.notRead?.events),
    unread(view.notRead ?? {}),
  ];
}

function overview(job, now) {
  const bounds = job.minReplicas === job.maxReplicas ? "" : ` (from ${job.minReplicas} to ${job.maxReplicas})`;
  const progress = job.progress ?? {};
  const percent = progress.progressPercentage;
  const left = progress.estimatedRemainingSeconds;
  return el("section", { key: "overview", "aria-label": "Overview" },
    percent === undefined ? null : el("p", { class: "progress" },
      el("progress", { max: 100, value: percent, "aria-label": "Steps done" }), ` ${percent}%`,
      left === undefined ? "" : `, about ${duration(left)} left`),
    facts([
      ["Size", `${job.training} of ${job.wanted} worker pods train${bounds}, ${plural(job.worldSize, "worker")}`],
      ["Step", progress.step === undefined ? "" : number(progress.step)],
      ["Rounds", `${job.rounds ?? 0}${job.lastRound ? `, the last one ${ago(job.lastRound, now)}` : ""}`],
      ["Restarts", `${job.restarts}, ${job.restartsCounted ?? 0} of ${job.maxRestarts} that maxRestarts allows`],
      job.goodput ? ["Goodput", `${number(job.goodput.percent)}%, ${duration(job.goodput.lostSeconds ?? 0)} lost by faults`] : null,
      job.straggler ? ["Slow rank", `${job.straggler.rank} in ${job.straggler.pod} on Node ${job.straggler.node}`] : null,
      ["Stage", typeof job.stage === "object" ? JSON.stringify(job.stage) : job.stage],
      job.completionTime ? ["Ended", ago(job.completionTime, now)] : ["Created", ago(job.created, now)],
    ]));
}

function causes(found) {
  if (!found.length) return null;
  return section("why", "Why", el("ul", { class: "causes" }, found.map((cause) => el("li", { key: cause.what },
    el("strong", {}, cause.what),
    cause.evidence ? el("p", {}, cause.evidence) : null,
    cause.next ? el("p", {}, "Next: ", el("code", {}, cause.next)) : null))));
}

function line(view, state) {
  const { start, end } = view.timeline;
  const all = end - start;
  const seconds = state.span === "all" ? all : state.span === "auto" ? Math.min(all, 3600) : Number(state.span);
  const from = Math.max(end - seconds, start);
  const legend = [["round", "a round trains"], ["past", "a round that ended"], ["recovery", "recovery"],
    ["up", "a pod runs"], ["waits", "a pod does not run"], ["gone", "a pod that is gone"],
    ["fault", "✕ fault", "text"], ["change", "◆ planned change", "text"]];
  return section("time", "Time line",
    el("p", {}, el("label", { for: "span" }, "Show "), el("select", { id: "span", onchange: (event) => state.choose(event.target.value) },
      SPANS.map(([value, text]) => el("option", { value, selected: value === state.span ? "" : null }, text)))),
    el("div", { class: "drawing" }, timeline(view.timeline, from, end, state.width)),
    el("ul", { class: "legend", "aria-hidden": "true" }, legend.map(([name, text, kind]) => el("li", {},
      kind ? null : el("span", { class: `swatch ${name}` }), el("span", { class: kind ? name : null }, text)))));
}

function charts(view, width) {
  const faults = view.timeline.faults.map((fault) => fault.time);
  const series = new Map();
  const add = (name, time, value) => {
    if (!series.has(name)) series.set(name, []);
    series.get(name).push([time, value]);
  };
  for (const sample of view.samples) {
    for (const [name, value] of Object.entries(sample.metrics ?? {})) add(name, sample.time, value);
  }
  for (const sample of view.samples) {
    if (sample.stepsPerSecond !== undefined) add("steps per second", sample.time, sample.stepsPerSecond);
  }
  const column = width > 760 ? Math.floor((width - 24) / 2) : width;
  const chosen = [...series.keys()].slice(-MOST_CHARTS); // the speed is the last one
  const drawn = chosen.map((name) => chart(name, series.get(name), faults, column));
  const rest = series.size > MOST_CHARTS ? el("p", { class: "quiet" }, `and ${plural(series.size - MOST_CHARTS, "more number")}`) : null;
  return section("training", "Loss and throughput",
    drawn.length ? el("div", { class: "charts" }, drawn) : null, rest,
    el("p", { class: "quiet" }, drawn.length
      ? "Since this page was first opened. A job reports every 30 seconds."
      : "The job has reported nothing yet: a script does by elasticjob.progress, or a log rule finds it."));
}

function pods(view) {
  const list = view.job.pods ?? [];
  const measured = Object.values(view.usage).some((used) => used.cpuCores !== undefined);
  const rows = list.map((pod) => {
    const used = view.usage[pod.name] ?? {};
    const limit = used.memoryLimitBytes === undefined ? "" : ` of ${bytes(used.memoryLimitBytes)}`;
    const cores = used.cpuCores === undefined ? "-" : used.cpuCores.toFixed(2);
    const memory = used.memoryBytes === undefined ? "-" : `${bytes(used.memoryBytes)}${limit}`;
    return { key: pod.name, cells: [
      pod.name, pod.role === "worker" ? ranks(pod.ranks) : pod.role, pod.node ?? "-",
      el("span", { class: `state ${pod.state === "Running" || pod.state === "Succeeded" ? "good" : "warn"}` }, pod.state),
      pod.restarts ?? 0, ...(measured ? [cores, memory] : []), ago(pod.created, view.now), pod.message ?? "",
    ] };
  });
  const columns = ["Pod", "Ranks", "Node", "State", "Restarts", ...(measured ? ["CPU cores", "Memory"] : []), "Created", "Message"];
  if (view.notRead?.pods) return section("pods", "Pods", el("p", { class: "notice" }, `Not shown: ${view.notRead.pods}`));
  return section("pods", "Pods", rows.length
    ? table("Pods", columns, rows, measured ? [4, 5, 6] : [4])
    : el("p", {}, "The job has no pods."));
}

function rounds(view, now) {
  const rows = [...view.rounds].reverse().map((round) => ({ key: round.number, cells: [
    round.number, clock(round.start), duration((round.end ?? now) - round.start), round.pods ?? "-", round.workers ?? "-", endText(round),
  ] }));
  return section("rounds", "Rounds", rows.length
    ? table("Rounds, newest first", ["Round", "Formed", "Trained", "Pods", "Workers", "Its end"], rows, [3, 4])
    : el("p", {}, "No round that is still known has formed."));
}

function failures(list, now) {
  const items = [...list].reverse().map((failure) => {
    const rank = failure.rank === undefined ? "" : ` rank ${failure.rank}`;
    const exit = failure.signal ?? (failure.exitCode === undefined ? "" : `exit code ${failure.exitCode}`);
    return el("li", { key: `${failure.time} ${failure.pod}${rank}` },
      el("h3", {}, el("span", { "aria-hidden": "true", class: "bad" }, "✕ "), failure.class ?? "failure"),
      el("p", {}, `${failure.pod ?? "-"}${rank} on Node ${failure.node ?? "-"}${exit ? `, ${exit}` : ""}, ${ago(failure.time, now)}`),
      failure.message || failure.reason ? el("pre", { tabindex: "0" }, (failure.message || failure.reason).trim()) : null,
      recovery(failure.recoverySeconds));
  });
  return section("faults", "Faults", items.length ? el("ul", { class: "faults" }, items) : el("p", {}, "None that is still known."));
}

function recovery(seconds) {
  const phases = ["detect", "stop", "rendezvous", "start"].filter((name) => seconds && name in seconds);
  if (!phases.length) return null;
  const total = phases.reduce((sum, name) => sum + seconds[name], 0);
  let at = 0;
  const bars = phases.map((name) => {
    const width = total ? (300 * seconds[name]) / total : 0;
    at += width;
    return el("rect", { x: at - width, y: 0, width: Math.max(1, width), height: 10, class: `phase ${name}` });
  });
  return el("div", { class: "recovered" },
    el("svg", { viewBox: "0 0 300 10", preserveAspectRatio: "none", width: 300, height: 10, "aria-hidden": "true" }, bars),
    el("p", {}, `Recovered in ${duration(total)}: `, phases.map((name, index) => [
      index ? ", " : "", el("span", { class: `swatch phase ${name}`, "aria-hidden": "true" }), ` ${name} ${duration(seconds[name])}`])));
}

function stacks(view, state, ask) {
  const waiting = state?.waiting;
  const found = state?.found;
  return section("stacks", "Stacks",
    el("p", {}, el("button", { type: "button", onclick: ask, "aria-disabled": waiting ? "true" : null }, found ? "Show stacks again" : "Show stacks"),
      " Where all ranks are now. This interrupts each worker for a moment, and needs the permission to exec in pods."),
    el("div", { role: "status" },
      waiting ? el("p", {}, "Asking the workers …") : null,
      state?.error ? el("p", { class: "notice" }, state.error) : null,
      found ? el("p", {}, `${plural(found.groups.reduce((sum, group) => sum + group.workers.length, 0), "worker")} answered at ${clock(found.now)}.`) : null,
      (found?.problems ?? []).map((text) => el("p", { class: "notice" }, text))),
    (found?.groups ?? []).map((group) => el("div", { key: group.workers[0] },
      el("h3", {}, `${plural(group.workers.length, "worker")}: ${group.workers.slice(0, 16).join(", ")}`),
      el("pre", { tabindex: "0" }, group.stack))));
}

function conditions(list, now) {
  if (!list.length) return null;
  const rows = list.map((c) => {
    const good = (c.status === "True") === GOOD.has(c.type) && c.status !== "Unknown";
    return { key: c.type, cells: [c.type, el("span", { class: `state ${good ? "good" : "warn"}` }, c.status), c.reason, ago(c.lastTransitionTime, now), c.message] };
  });
  return section("conditions", "Conditions", table("Conditions", ["Condition", "Status", "Reason", "Since", "Message"], rows));
}

function unread(sentences) {
  const rest = Object.entries(sentences).filter(([resource]) => resource !== "pods" && resource !== "events");
  if (!rest.length) return null;
  return section("unread", "Not read", rest.map(([resource, text]) => el("p", { key: resource, class: "quiet" }, `${resource}: ${text}`)));
}

function events(list, now, refused) {
  if (refused) return section("events", "Events", el("p", { class: "notice" }, `Not shown: ${refused}`));
  if (!list.length) return null;
  const rows = [...list].reverse().map((event, index) => ({ key: `${event.time} ${event.reason} ${event.object} ${index}`, cells: [
    ago(event.time, now), el("span", { class: `state ${event.type === "Warning" ? "warn" : ""}` }, event.type), event.reason, event.object,
    `${event.message ?? ""}${event.count ? ` (${event.count} times)` : ""}`,
  ] }));
  return section("events", "Events", el("details", {},
    el("summary", {}, `${plural(list.length, "Event")}, newest first`), table("Events", ["When", "Type", "Reason", "Object", "Message"], rows)));
}

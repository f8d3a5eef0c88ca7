// Ask for what the address shows, every two seconds, and say when what is shown is old.

import { el, show } from "./dom.js";
import { duration, plural } from "./format.js";
import { jobPage } from "./job.js";
import { jobsPage } from "./jobs.js";

const INTERVAL = 2000, HIDDEN_INTERVAL = 15000, PATIENCE = 10000;
const OLD = 8000; // milliseconds after which what is shown counts as old, whatever the reason
const byId = (id) => document.getElementById(id);
const main = byId("main");

const state = {
  path: null, // of the API, for what is shown
  view: null, received: 0, problem: "", wrong: "", sequence: 0, timer: 0,
  span: "auto", stacks: null, width: 0,
  choose: (span) => { state.span = span; draw(); },
  ask: () => askStacks(),
};

function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decode);
  return parts.length === 2 ? `api/jobs/${parts.map(encodeURIComponent).join("/")}` : "api/jobs";
}

function decode(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

async function fetchView(path, options = {}, patience = PATIENCE) {
  const response = await fetch(path, { ...options, signal: AbortSignal.timeout(patience) });
  const view = await response.json().catch(() => ({ error: `the answer is none of elasticjob ui (HTTP ${response.status})` }));
  if (!response.ok) throw Object.assign(new Error(view.error ?? `HTTP ${response.status}`), { status: response.status });
  return view;
}

function problemOf(error) {
  if (error.status) return error.message;
  if (error.name === "TimeoutError") return `elasticjob ui has not answered for ${PATIENCE / 1000} s`;
  return "elasticjob ui does not answer: its command may have ended";
}

async function poll() {
  clearTimeout(state.timer);
  const sequence = ++state.sequence, path = state.path;
  try {
    const view = await fetchView(path);
    if (sequence !== state.sequence) return;
    announce(state.view, view);
    Object.assign(state, { view, received: Date.now(), problem: "", wrong: "" });
  } catch (error) {
    if (sequence !== state.sequence) return;
    if (error.status === 404 && !state.view) state.wrong = error.message;
    state.problem = problemOf(error);
  }
  draw();
  state.timer = setTimeout(poll, document.hidden ? HIDDEN_INTERVAL : INTERVAL);
}

function draw() {
  state.width = Math.max(240, Math.floor(main.clientWidth - 2 * parseFloat(getComputedStyle(main).paddingLeft)));
  if (state.view) show(main, state.view.jobs ? jobsPage(state.view) : jobPage(state.view, state));
  else if (state.problem) {
    show(main, [el("h1", { tabindex: "-1", id: "title" }, state.wrong ? "There is no such job" : "Nothing could be read yet"),
      el("p", {}, el("a", { href: "#/" }, "All jobs"))]);
  }
  const name = state.view?.job?.name;
  const phase = name ? ` ${state.view.job.phase ?? ""}` : "";
  const title = `${name ? `${name}${phase} – ` : ""}ElasticJobs`;
  document.title = isOld() ? `Old: ${title}` : title;
  if (state.view?.server) byId("source").textContent = state.view.server;
  tell();
}

function isOld() {
  return state.problem !== "" || (state.received > 0 && Date.now() - state.received > OLD + (document.hidden ? HIDDEN_INTERVAL : 0));
}

// Say whether what is shown is true now. The alert changes only when the problem does, so that it is read out once.
function tell() {
  const old = isOld();
  document.body.classList.toggle("old", old);
  const seconds = (Date.now() - state.received) / 1000;
  byId("fresh").textContent = old
    ? (state.received ? `Old: read ${duration(Math.floor(seconds))} ago` : "Not connected")
    : (state.received ? `Live: read ${duration(Math.floor(seconds))} ago` : "connecting");
  const text = old ? `${state.problem || "no answer for a while"}. ${state.view ? "What you see is old. " : ""}Trying again.` : "";
  if (byId("problem").textContent !== text) byId("problem").textContent = text;
}

// Say to a screen reader what has changed.
function announce(before, after) {
  if (!before) return;
  const said = [];
  const tellPhase = (name, old, now) => { if (old !== now) said.push(`${name} is ${now || "without a status"}`); };
  if (after.jobs && before.jobs) {
    const known = new Map(before.jobs.map((job) => [`${job.namespace}/${job.name}`, job]));
    for (const job of after.jobs) {
      const old = known.get(`${job.namespace}/${job.name}`);
      if (old) tellPhase(job.name, old.phase, job.phase);
      else said.push(`new job ${job.name}`);
    }
  } else if (after.job && before.job) {
    tellPhase(after.job.name, before.job.phase, after.job.phase);
    const old = new Set((before.job.failures ?? []).map((failure) => `${failure.time} ${failure.pod}`));
    for (const failure of after.job.failures ?? []) {
      if (!old.has(`${failure.time} ${failure.pod}`)) said.push(`fault: ${failure.class} in ${failure.pod}`);
    }
    if ((after.job.rounds ?? 0) > (before.job.rounds ?? 0)) said.push(`round ${after.job.rounds} trains with ${plural(after.job.worldSize, "worker")}`);
  }
  if (said.length) byId("said").textContent = `${said.slice(0, 5).join("; ")}.`;
}

async function askStacks() {
  if (state.stacks?.waiting) return;
  const path = state.path;
  state.stacks = { ...state.stacks, waiting: true, error: "" };
  draw();
  let answer;
  try {
    answer = { found: await fetchView(`${path}/stacks`, { method: "POST" }, 90000) };
  } catch (error) {
    answer = { error: problemOf(error) };
  }
  if (path !== state.path) return;
  state.stacks = answer;
  draw();
}

function go() {
  const path = route();
  if (path === state.path) return;
  const first = state.path === null;
  Object.assign(state, { path, view: null, received: 0, stacks: null, span: "auto", problem: "", wrong: "" });
  show(main, [el("p", {}, "Reading the cluster …")]);
  poll().then(() => { if (!first) (byId("title") ?? main).focus(); });
}

byId("skip").onclick = (event) => { event.preventDefault(); main.focus(); };
addEventListener("hashchange", go);
addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
setInterval(tell, 1000);
go();

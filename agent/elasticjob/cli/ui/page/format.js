// Times, numbers and phases as people read them.

const MARKS = {
  Running: "●", Succeeded: "✓", Failed: "✕", Degraded: "◐", Restarting: "↻", Pending: "…", Scaling: "⇅",
  Starting: "▷", Suspended: "‖", Deleting: "−",
};

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "-";
  if (seconds < 10) return `${Number(Math.max(0, seconds).toPrecision(2))} s`;
  let left = Math.floor(seconds);
  for (const [unit, size, part, small] of [["d", 86400, "h", 3600], ["h", 3600, "m", 60], ["m", 60, "s", 1]]) {
    if (left >= size) {
      const rest = Math.floor((left % size) / small);
      return `${Math.floor(left / size)}${unit}${rest ? ` ${rest}${part}` : ""}`;
    }
  }
  return `${left} s`;
}

// Return how long ago an RFC 3339 text or a Unix time was.
export function ago(time, now) {
  const seconds = typeof time === "number" ? time : Date.parse(time) / 1000;
  return Number.isFinite(seconds) ? `${duration(Math.max(0, Math.floor(now - seconds)))} ago` : "-";
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

export function number(value) {
  if (!Number.isFinite(value)) return "-";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function bytes(count) {
  if (count === undefined) return "-";
  return count >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(2)} GiB` : `${Math.round(count / 2 ** 20)} MiB`;
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

export function ranks(list) {
  if (!list || !list.length) return "-";
  return list.length === 1 ? String(list[0]) : `${list[0]}–${list[list.length - 1]}`;
}

export function phaseMark(phase) {
  return MARKS[phase] ?? "?";
}

// Return the class of a phase: its colour, which its mark and its word repeat.
export function phaseClass(phase) {
  if (phase === "Running" || phase === "Succeeded") return "good";
  if (phase === "Failed") return "bad";
  return phase === "Suspended" || phase === "Deleting" ? "idle" : "warn";
}

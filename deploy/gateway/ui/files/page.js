// The page: follows the region's view, and puts what changed where it belongs.

import { Table, bar, bytes, make, map, meter, percent, seconds, setClass, setText, spark, tokens } from "/ui/draw.js";
import { follow, keepKey, keptKey } from "/ui/stream.js";

const byId = (id) => document.getElementById(id);
const find = (selector) => document.querySelector(selector);

// The parts of a TTFT in their order, in groups that share a colour.
const GROUPS = [
  ["before", "read media render look_up move reserve"],
  ["encode", "encode"],
  ["queue", "queue open engine_queue"],
  ["prefill", "prefill"],
  ["transfer", "transfer_tail news"],
  ["load", "load_wait load"],
  ["first step", "first_step load_and_first_step"],
  ["relay", "relay other"],
  ["decode", "decode load_and_decode"],
];
const GROUP_OF = new Map(GROUPS.flatMap(([, names], index) => names.split(" ").map((name) => [name, index])));
const KINDS = ["region", "clusters", "instances", "links", "requests", "plan", "models", "decisions", "caches", "gateways"];
const view = Object.fromEntries(KINDS.map((kind) => [kind, new Map()]));
const rates = new Map();
const MINUTES = 5;
let longest = 0;

const by = (...names) => (a, b) => {
  for (const name of names) {
    const order = String(a[name] ?? "").localeCompare(String(b[name] ?? ""), "en", { numeric: true });
    if (order) return order;
  }
  return 0;
};

function badge(cell, word, kind) {
  if (!cell.firstChild) cell.append(make("span"));
  setText(cell.firstChild, word);
  setClass(cell.firstChild, `badge ${kind}`);
}

function clock(unix_s) {
  return new Date(unix_s * 1000).toLocaleTimeString("en-GB");
}

const OUTCOMES = { ok: "good", open: "busy", client_gone: "idle" };
const CONDITIONS = { clear: "good", rising: "warn", congested: "warn", down: "bad" };
const PHASES = { serving: "good", draining: "warn", leaving: "warn", joining: "busy" };

function whyThere(row) {
  const where = [row.route || "not routed", row.target && row.target !== row.route ? row.target : ""].filter(Boolean).join(" ");
  return [where, row.reason, row.spill && `decodes elsewhere: ${row.spill}`, row.error_code, row.error || row.prefill_error].filter(Boolean).join(" · ");
}

function load(row) {
  return row.role === "prefill" || !row.decode_slots
    ? [row.running / Math.max(row.max_concurrent, 1), `${row.running} of ${row.max_concurrent}`]
    : [row.num_running / row.decode_slots, `${row.num_running} of ${row.decode_slots}`];
}

const tables = {
  links: new Table(find(".links"), [
    { title: "Link", className: "name", text: (row) => `${row.source} → ${row.target}` },
    { title: "Condition", className: "", draw: (cell, row) => {
      badge(cell, row.condition || "not measured", CONDITIONS[row.condition] || "idle");
      cell.title = row.reason || "";
    } },
    { title: "Rate", className: "number", text: (row) => row.achieved_bytes_per_s == null ? "–" : `${bytes(row.achieved_bytes_per_s)}/s` },
    { title: "Available", className: "number", text: (row) => row.available_bytes_per_s == null ? "–" : `${row.is_floor ? "≥ " : ""}${bytes(row.available_bytes_per_s)}/s` },
    { title: "RTT", className: "number", text: (row) => seconds(row.rtt_s) },
    { title: "Loss", className: "number", text: (row) => percent(row.loss) },
    { title: "Current threshold", className: "number", text: (row) => {
      if (row.threshold_tokens == null) return "–";
      const isRaised = row.threshold_tokens !== row.base_tokens;
      return `${tokens(row.threshold_tokens)} tokens${isRaised ? ` (planned ${tokens(row.base_tokens)})` : ""}`;
    } },
    { title: "Rate, last 5 min", className: "spark", draw: (cell, row) => spark(cell, rates.get(`${row.source} ${row.target}`) || [0, 0]) },
  ], { empty: "This gateway has no links.", order: by("source", "target") }),
  requests: new Table(find(".requests"), [
    { title: "Time", className: "number", text: (row) => clock(row.started_s) },
    { title: "Outcome", className: "", draw: (cell, row) => badge(cell, row.outcome.replace("_", " "), OUTCOMES[row.outcome] || "bad") },
    { title: "Tokens", className: "number", text: (row) => tokens(row.num_prompt_tokens) },
    { title: "Model", className: "name", text: (row) => [row.model, row.tenant && `of ${row.tenant}`].filter(Boolean).join(" ") },
    { title: "Where and why", className: "why", text: whyThere },
    { title: "TTFT", className: "ttft", draw: (cell, row) => {
      const parts = Object.entries(row.parts || {}).filter(([, value]) => value > 0).map(([name, value]) => [name.replace(/_s$/, ""), value]);
      bar(cell, parts, row.ttft_s, longest, (name) => `part-${GROUP_OF.get(name) ?? 7}`);
    } },
  ], { empty: "No request yet.", order: (a, b) => b.started_s - a.started_s }),
  decisions: new Table(find(".decisions"), [
    { title: "Time", className: "number", text: (row) => clock(row.at_s) },
    { title: "Model", className: "name", text: (row) => [row.model, row.pd].filter(Boolean).join(" in ") },
    { title: "Reason", className: "name", text: (row) => row.reason },
    { title: "What was done", className: "why", text: (row) => row.done.join("; ") },
  ], { empty: "No decision yet.", order: (a, b) => b.at_s - a.at_s }),
  caches: new Table(find(".caches"), [
    { title: "Node", className: "name", text: (row) => `${row.cluster}/${row.node}` },
    { title: "Hits", className: "load", draw: (cell, row) => meter(cell, row.hit_share, percent(row.hit_share)) },
    { title: "Held", className: "number", text: (row) => bytes(row.nbytes) },
    { title: "Blocks", className: "number", text: (row) => tokens(row.num_blocks) },
    { title: "Evictions", className: "number", text: (row) => tokens(row.evictions) },
    { title: "Embeddings", className: "number", text: (row) => {
      if (!row.num_embeddings) return "–";
      const hits = row.embedding_hit_share == null ? "" : `, ${percent(row.embedding_hit_share)} hits`;
      return `${tokens(row.num_embeddings)}, ${bytes(row.embedding_bytes)}${hits}`;
    } },
    { title: "State", className: "why", text: (row) => row.error || "ok" },
  ], { empty: "This region keeps no prefix caches.", order: by("cluster", "node") }),
  gateways: new Table(find(".gateways"), [
    { title: "Name", className: "name", text: (row) => row.name },
    { title: "State", className: "name", text: (row) => row.state },
    { title: "Role", className: "name", text: (row) => row.leads ? "leads" : "follows" },
    { title: "Error", className: "why", text: (row) => row.error || "–" },
  ], { empty: "", order: by("name") }),
  instances: new Table(find(".instances"), [
    { title: "Instance", className: "name", text: (row) => row.name },
    { title: "Cluster", className: "name", text: (row) => row.cluster },
    { title: "Role", className: "name", text: (row) => row.role + (row.role_ready === false ? " (changes)" : "") + (row.paced ? ", paced" : "") },
    { title: "State", className: "", draw: (cell, row) => badge(cell, row.healthy ? row.phase || "serving" : "not healthy", row.healthy ? PHASES[row.phase] || "good" : "bad") },
    { title: "Load", className: "load", draw: (cell, row) => meter(cell, ...load(row)) },
    { title: "KV memory", className: "load", draw: (cell, row) => meter(cell, row.kv_usage, percent(row.kv_usage)) },
    { title: "Waiting", className: "number", text: (row) => String(row.num_waiting ?? 0) },
    { title: "Why", className: "why", text: (row) => row.reason || "–" },
  ], { empty: "No instance.", order: by("cluster", "name") }),
};

function pairs(place, rows) {
  while (place.children.length > rows.length) place.lastChild.remove();
  rows.forEach(([name, value], index) => {
    if (!place.children[index]) {
      const group = make("div");
      group.append(make("dt"), make("dd"));
      place.append(group);
    }
    setText(place.children[index].firstChild, name);
    setText(place.children[index].lastChild, value);
  });
}

function showNumbers() {
  const now = view.region.get("now") || {};
  const instances = [...view.instances.values()];
  const healthy = instances.filter((row) => row.healthy).length;
  const links = [...view.links.values()].filter((row) => row.condition);
  const clear = links.filter((row) => row.condition === "clear").length;
  pairs(byId("numbers"), [
    ["Requests in flight", String(now.in_flight ?? "–")],
    ["Instances healthy", `${healthy} of ${instances.length}`],
    ["Links clear", links.length ? `${clear} of ${links.length}` : "–"],
    ["Clusters", String(view.clusters.size)],
  ]);
}

function showPlan() {
  const plan = view.plan.get("now") || {};
  const rows = Object.entries(plan.thresholds || {}).map(([name, value]) => [`Planned threshold of ${name}`, `${tokens(value)} tokens`]);
  for (const row of view.models.values()) {
    const count = (found) => Object.entries(found || {}).map(([name, value]) => `${value} in ${name}`).join(", ");
    const encode = count(row.num_encode) ? `encode ${count(row.num_encode)}; ` : "";
    rows.push([`Division of ${row.model || "the model"}`, `${encode}prefill ${count(row.num_prefill) || "–"}; decode ${count(row.num_decode) || "–"}`]);
    if (row.unknown) rows.push([`No plan for ${row.model || "the model"}`, row.unknown]);
  }
  pairs(byId("plan"), [["Mode", plan.mode || "–"], ["Conversion", plan.conversion || "none"], ...rows]);
}

function showMap() {
  const instances = [...view.instances.values()];
  map(byId("map"), [...view.clusters.values()].sort(by("name")), [...view.links.values()].sort(by("source", "target")), (row) => {
    const roles = {};
    for (const item of instances) if (item.cluster === row.name) roles[item.role] = (roles[item.role] || 0) + 1;
    const told = Object.entries(roles).map(([role, count]) => `${count} ${role}`).join(", ");
    return [told || "no instances", row.healthy ? `${row.running} run, ${row.queue_depth} wait` : row.reason || "not healthy"];
  });
}

function matches(row) {
  const word = byId("search").value.trim().toLowerCase();
  return !word || `${row.name} ${row.cluster} ${row.role} ${row.phase}`.toLowerCase().includes(word);
}

function filter() {
  for (const item of tables.instances.rows.values()) item.at.hidden = !matches(item.row);
}

/** Show what changed: `changed` maps a kind to its changed keys. */
function show(changed) {
  if (changed.requests) {
    const most = Math.max(0, ...[...view.requests.values()].map((row) => row.ttft_s || 0));
    // All bars have one scale.
    if (most !== longest) { longest = most; changed.requests = [...view.requests.keys()]; }
  }
  for (const [kind, table] of Object.entries(tables)) {
    for (const key of changed[kind] || []) {
      const row = view[kind].get(key);
      if (row) table.set(key, row);
      else table.delete(key);
    }
    table.sort();
    const count = find(`#h-${kind} .count`);
    if (count) setText(count, String(view[kind].size));
  }
  byId("gateways").hidden = view.gateways.size === 0;
  if (changed.instances) filter();
  if (changed.clusters || changed.links || changed.instances) showMap();
  if (changed.plan || changed.models) showPlan();
  showNumbers();
}

function take(name, value) {
  const changed = {};
  if (name === "view") {
    for (const kind of KINDS) {
      const rows = new Map(Object.entries(value[kind] || {}));
      changed[kind] = [...new Set([...view[kind].keys(), ...rows.keys()])];
      view[kind] = rows;
    }
    byId("sign-in").hidden = true;
    byId("region").hidden = false;
    byId("leave").hidden = !keptKey();
    setState("live");
  } else {
    for (const kind of KINDS) {
      const found = value[kind];
      if (!found) continue;
      for (const [key, row] of Object.entries(found.set)) view[kind].set(key, row);
      for (const key of found.gone) view[kind].delete(key);
      changed[kind] = [...Object.keys(found.set), ...found.gone];
    }
  }
  show(changed);
}

function setState(words) {
  setText(byId("state"), words);
  setClass(byId("state"), words === "live" ? "live" : "");
}

let stop = null;

function signIn(words) {
  stop?.();
  for (const kind of KINDS) {
    const keys = [...view[kind].keys()];
    view[kind].clear();
    for (const key of keys) tables[kind]?.delete(key);
  }
  rates.clear();
  byId("map").replaceChildren();
  for (const id of ["numbers", "plan"]) byId(id).replaceChildren();
  byId("region").hidden = true;
  byId("leave").hidden = true;
  byId("sign-in").hidden = false;
  setText(byId("sign-in-error"), words);
  setState("signed out");
  byId("key").focus();
}

function start() {
  setState("connecting");
  stop = follow({
    event: take,
    state: setState,
    refused: (status) => {
      const had = keptKey();
      keepKey("");
      signIn(!had ? "" : status === 403 ? "This key is not an operator's." : "This key is not known here.");
    },
  });
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key").value.trim());
  byId("key").value = "";
  start();
});
byId("leave").addEventListener("click", () => { keepKey(""); signIn(""); });
byId("search").addEventListener("input", filter);

const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  setText(byId("theme"), name === "dark" ? "Light" : "Dark");
}

setTheme(localStorage.getItem("prfaas-theme") || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!localStorage.getItem("prfaas-theme")) setTheme(dark.matches ? "dark" : "light"); });
byId("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("prfaas-theme", name);
  setTheme(name);
});

GROUPS.forEach(([name], index) => {
  const item = make("li");
  item.append(make("span", `part-${index}`), make("span", "", name));
  byId("legend").append(item);
});

setInterval(() => {
  for (const [key, row] of view.links) {
    const points = rates.get(key) || [];
    points.push(row.achieved_bytes_per_s || 0);
    if (points.length > MINUTES * 60) points.shift();
    rates.set(key, points);
    if (!document.hidden) tables.links.set(key, row);
  }
}, 1000);
new ResizeObserver(() => { if (view.clusters.size) showMap(); }).observe(byId("main"));
start();

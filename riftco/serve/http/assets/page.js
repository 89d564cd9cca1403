// One page over the server's own routes. The key lives in this variable and nowhere else.
let key = "";
let asked = false; // whether the reader was asked for a key already
const EVERY = 1000; // milliseconds between looks
const LINES = 200; // of the log
const $ = (id) => document.getElementById(id);

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function api(path, body) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, cache: "no-store" };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["content-type"] = "application/json";
  }
  const answer = await fetch(path, options);
  const made = await answer.json();
  if (!answer.ok) throw new Refused(answer.status, made.error?.message ?? answer.statusText);
  return made;
}

function say(text) {
  $("said").textContent = text;
  $("said").hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { $("said").hidden = true; }, 5000);
}

/** What a button does; what the server says against it is shown. */
async function act(what, done) {
  try {
    say(done(await what()));
  } catch (why) {
    say(why.message);
    if (why.status === 401 || why.status === 403) ask();
  }
  await look();
}

function ask() {
  if (!$("ask").open) { $("given").value = ""; $("ask").showModal(); }
}
$("key").onclick = ask;
$("later").onclick = () => $("ask").close();
$("ask").querySelector("form").onsubmit = (event) => {
  event.preventDefault();
  key = $("given").value.trim();
  $("given").value = "";
  $("ask").close();
  asked = false;
  look();
};

function make(tag, name = "", text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

/** Elements by key: each is made once and changed afterwards, so that nothing is lost under the reader's hand. */
function keyed(parent, items, id, create, change) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.id, child]));
  items.forEach((item, at) => {
    let child = kept.get(String(id(item)));
    if (!child) { child = create(item); child.dataset.id = id(item); }
    kept.delete(child.dataset.id);
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
    change(child, item);
  });
  kept.forEach((child) => child.remove());
}

function put(parent, name, text) {
  const where = parent.querySelector(`.${name}`);
  if (where.textContent !== text) where.textContent = text;
  return where;
}

const number = (n) => n.toLocaleString("en", { maximumFractionDigits: 0 });

// slots
function slotCard() {
  const card = make("div", "card");
  const head = make("p", "row");
  head.append(make("b", "title"), make("span", "grow"), make("span", "pill state"));
  const bar = make("div", "bar");
  bar.append(make("i"));
  card.append(head, bar, make("div", "small rows"), make("div", "small under"));
  return card;
}

function showSlot(card, slot) {
  put(card, "title", `Slot ${slot.id}`);
  put(card, "state", slot.state).className = `pill state ${slot.state}`;
  card.querySelector(".bar i").style.width = `${(100 * slot.n_tokens) / slot.n_ctx}%`;
  put(card, "rows", `${number(slot.n_tokens)} of ${number(slot.n_ctx)} tokens`);
  put(card, "under", slot.lora.map((use) => `${use.id} v${use.version}${use.scale === 1 ? "" : ` × ${use.scale}`}`).join(", ") || "base model");
}

// adapters
function adapterCard(adapter) {
  const id = adapter.id;
  const path = `/adapters/${encodeURIComponent(id)}`;
  const card = make("div", "card adapter");
  const name = make("div", "name");
  name.append(make("b", "title", id), make("span", "pill version"), make("div", "small detail"));
  const serves = make("label", "switch");
  const box = make("input", "scale");
  box.type = "checkbox";
  box.onchange = async () => {
    const on = box.checked; // a look may show the server's old word meanwhile
    box.disabled = true;
    await act(
      async () => {
        const now = await api("/lora-adapters");
        const others = now.filter((one) => one.id !== id && one.scale).map((one) => ({ id: one.id, scale: one.scale }));
        return api("/lora-adapters", on ? [...others, { id, scale: 1 }] : others);
      },
      () => (on ? `${id} now serves every request that names no adapter` : `${id} serves requests that name it`),
    );
    box.disabled = false;
  };
  serves.append(box, "serves everyone");
  const back = make("select", "back");
  back.ariaLabel = `Roll ${id} back to a version`;
  back.onchange = () => {
    const version = Number(back.value);
    back.selectedIndex = 0;
    if (version) act(() => api(`${path}/rollback`, { version }), (now) => `${id}: version ${now.version} serves, with the weights of version ${version}`);
  };
  const undo = make("button", "undo", "Undo");
  undo.title = "Take the last step back";
  undo.onclick = () => act(() => api("/learn/undo", { lora_id: id, n: 1 }), (now) => `${id} is back at step ${now.step}`);
  const promote = make("button", "main promote", "Promote");
  promote.title = "Publish what was learned as the next version";
  promote.onclick = () => act(() => api(`${path}/promote`, {}), (now) => `${id}: version ${now.version} serves`);
  card.append(name, serves, back, undo, promote);
  return card;
}

function showAdapter(card, adapter) {
  put(card, "version", `version ${adapter.version}`);
  const left = adapter.promotable ? "learned more than it serves" : "serves all that it learned";
  put(card, "detail", `step ${adapter.step} · ${left} · ${adapter.digest.slice(0, 8)}`);
  const box = card.querySelector(".scale");
  if (!box.disabled) box.checked = adapter.scale !== 0;
  card.querySelector(".undo").disabled = !adapter.undoable;
  card.querySelector(".promote").disabled = !adapter.promotable;
  const back = card.querySelector(".back");
  if (back.options.length !== adapter.version + 1) {
    back.replaceChildren(new Option("Roll back…", ""));
    for (let version = adapter.version; version > 0; version--) back.append(new Option(`to version ${version}`, version));
  }
}

// training jobs
function jobCard(job) {
  const card = make("div", "card");
  const head = make("p", "row");
  const stop = make("button", "stop", "Cancel");
  stop.onclick = () => act(() => api(`/train/${encodeURIComponent(job.id)}/cancel`, {}), () => "The job was cancelled; what it learned stays");
  head.append(make("b", "title", `Training ${job.lora_id}`), make("span", "pill state"), make("span", "grow"), stop);
  const bar = make("div", "bar");
  bar.append(make("i"));
  card.append(head, bar, make("div", "small rows"));
  return card;
}

function showJob(card, job) {
  put(card, "state", job.status).className = `pill state ${job.status}`;
  card.querySelector(".bar i").style.width = `${(100 * job.step) / job.steps}%`;
  const last = job.losses.at(-1);
  put(card, "rows", `step ${number(job.step)} of ${number(job.steps)}${last === undefined ? "" : ` · loss ${last.toFixed(3)}`}`);
}

// the log
const WHAT = {
  create: () => "created", learn: (line) => (line.job ? "trained" : "learned"), undo: (line) => `undid ${line.steps}`,
  promote: (line) => `version ${line.version}`, rollback: (line) => `back to version ${line.to}`,
};

function logRow() {
  const row = make("tr");
  row.append(...["time", "what", "adapter", "n loss", "n tokens", "n ms", "id"].map((name) => make("td", name)));
  return row;
}

function showLine(row, line) {
  put(row, "time", new Date(1000 * line.time).toLocaleTimeString());
  put(row, "what", (WHAT[line.kind] ?? (() => line.kind))(line));
  put(row, "adapter", line.adapter);
  put(row, "loss", line.loss_before === undefined ? "" : line.loss_before.toFixed(3));
  put(row, "tokens", line.n_labelled === undefined ? "" : number(line.n_labelled));
  put(row, "ms", line.ms === undefined ? "" : number(line.ms));
  put(row, "id", line.learn_id ?? "").title = line.learn_id ?? "";
}

// the curve
function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ticks(most) {
  const rough = most / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function drawCurve(lines) {
  const chart = $("chart");
  const width = chart.clientWidth;
  const height = chart.clientHeight;
  const [left, right, top, bottom] = [44, 14, 20, 24];
  const learns = lines.filter((line) => line.kind === "learn");
  const most = 1.08 * Math.max(...learns.map((line) => line.loss_before), 1e-6);
  const x = (i) => left + ((i + 0.5) * (width - left - right)) / learns.length;
  const y = (loss) => height - bottom - (loss / most) * (height - top - bottom);
  const parts = [];
  for (const loss of ticks(most)) {
    parts.push(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(loss), y2: y(loss) }));
    parts.push(svg("text", { x: left - 8, y: y(loss) + 4, "text-anchor": "end" }, String(Number(loss.toPrecision(3)))));
  }
  const marks = new Map(); // learns so far -> what happened then
  let before = 0;
  for (const line of lines) {
    const label = { undo: `−${line.steps}`, promote: `v${line.version}`, rollback: `v${line.version}` }[line.kind];
    if (line.kind === "learn") before += 1;
    else if (label) marks.set(before, [...(marks.get(before) ?? []), label]);
  }
  for (const [i, labels] of marks) {
    const at = left + (i * (width - left - right)) / learns.length;
    const end = i > 0.9 * learns.length;
    parts.push(svg("line", { class: "mark", x1: at, x2: at, y1: top - 8, y2: height - bottom }));
    parts.push(svg("text", { x: at + (end ? -5 : 5), y: top, "text-anchor": end ? "end" : "start" }, labels.join(" ")));
  }
  const adapters = [...new Set(learns.map((line) => line.adapter))];
  const points = learns.map((line, i) => ({ line, x: x(i), y: y(line.loss_before), series: adapters.indexOf(line.adapter) % 4 }));
  adapters.forEach((adapter, s) => {
    const own = points.filter((point) => point.line.adapter === adapter);
    parts.push(svg("polyline", { class: `curve s${s % 4}`, points: own.map((point) => `${point.x},${point.y}`).join(" ") }));
  });
  const radius = points.length > 60 ? 2 : 3.5;
  for (const point of points) parts.push(svg("circle", { class: `s${point.series}`, cx: point.x, cy: point.y, r: radius }));
  parts.push(svg("text", { x: left, y: height - 4 }, `${learns.length === 1 ? "the only learn" : `the last ${number(learns.length)} learns`}, oldest first`));
  chart.replaceChildren(...parts);
  $("legend").replaceChildren(...(adapters.length > 1 ? adapters.map((adapter, s) => make("span", `s${s % 4}`, adapter)) : []));
  chart.onpointermove = (event) => {
    const at = event.clientX - chart.getBoundingClientRect().left;
    const near = points.reduce((a, b) => (Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a));
    $("tip").textContent = `${near.line.adapter} · step ${near.line.step} · ${near.line.loss_before.toFixed(4)}`;
    $("tip").style.left = `${near.x + 16}px`;
    $("tip").style.top = `${near.y + chart.offsetTop}px`;
    $("tip").hidden = false;
  };
  chart.onpointerleave = () => { $("tip").hidden = true; };
}

// what is asked, again and again
const rates = [];
let counted = null;

function showRate(tokens) {
  const now = performance.now();
  if (counted && tokens >= counted.tokens) rates.push((1000 * (tokens - counted.tokens)) / (now - counted.at));
  counted = { tokens, at: now };
  if (rates.length > 60) rates.shift();
  const newest = rates.slice(-3);
  const rate = newest.reduce((a, b) => a + b, 0) / Math.max(newest.length, 1);
  $("rate").textContent = rate >= 100 ? number(rate) : rate.toFixed(1);
  const most = Math.max(...rates, 1);
  const path = rates.map((r, i) => `${i ? "L" : "M"}${(120 * (i + 60 - rates.length)) / 59} ${31 - (29 * r) / most}`).join("");
  $("spark").replaceChildren(svg("path", { d: path || "M0 31" }));
}

let newest = 0; // a look that another one has overtaken shows nothing
async function look() {
  const mine = ++newest;
  try {
    const [props, slots] = await Promise.all([api("/props"), api("/slots")]);
    if (mine !== newest) return;
    $("link").textContent = "live";
    $("link").className = "pill live";
    $("model").textContent = `${props.model} · ${props.cache_dtype} cache · ${props.version}`;
    document.title = `riftco · ${props.model}`;
    showRate(props.totals.tokens_predicted);
    $("busy").textContent = `${slots.filter((slot) => slot.is_processing).length} of ${slots.length}`;
    $("waiting").textContent = number(props.totals.waiting);
    const { prompt_tokens: prompt, prompt_tokens_cached: cached } = props.totals;
    $("reuse").textContent = `${Math.round((100 * cached) / Math.max(prompt, 1))} %`;
    $("learned").textContent = number(props.totals.learned);
    keyed($("slots"), slots, (slot) => slot.id, slotCard, showSlot);
    $("learning").hidden = !props.learns;
    $("frozen").hidden = props.learns;
    if (props.learns) {
      keyed($("adapters"), props.adapters, (adapter) => adapter.id, adapterCard, showAdapter);
      await lookAtLearning(mine);
    }
  } catch (why) {
    if (mine !== newest) return;
    $("link").textContent = why.status === 401 ? "needs a key" : "no connection";
    $("link").className = "pill lost";
    if (why.status === 401 && !asked) { asked = true; ask(); }
  }
}

async function lookAtLearning(mine) {
  let lines = [];
  let jobs = [];
  try {
    const [log, all] = await Promise.all([api(`/learn/log?limit=${LINES}`), api("/train")]);
    [lines, jobs] = [log.data, all.data];
    $("locked").hidden = true;
  } catch (why) {
    if (why.status !== 403) throw why;
    $("locked").hidden = false;
  }
  if (mine !== newest) return;
  keyed($("jobs"), jobs.filter((job) => ["queued", "running"].includes(job.status)), (job) => job.id, jobCard, showJob);
  const learned = lines.some((line) => line.kind === "learn");
  $("nothing").hidden = learned || !$("locked").hidden;
  $("curve").hidden = !learned;
  $("log").hidden = !lines.length;
  keyed($("log").tBodies[0], lines.slice(-14).reverse(), (line) => `${line.adapter}/${line.event}`, logRow, showLine);
  if (learned) drawCurve(lines);
}

let looking = null;
async function again() {
  if (!document.hidden && !looking) looking = look().finally(() => { looking = null; });
  await looking;
  setTimeout(again, EVERY);
}
again();

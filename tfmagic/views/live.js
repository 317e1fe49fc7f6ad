// The live panel of a run (see live.py for the two channels that feed it).
//
// One `Story` a widget keeps what the run has told, outside the page; each view draws it: what is new since the view's
// last drawing, in one animation frame, never the whole token list again. A frame carries, besides its sequence number,
//   head     the run's fields that changed           (names: `head_of` in frames.py)
//   streams  { i: { segments, bars, ...fields } }    segments [kind, text], bars [drafted, accepted, copied]
// and a snapshot has the same form with everything in it.

const CONTROL = "tfmagic.control";
const VIEW = "application/vnd.jupyter.widget-view+json";
const PARTS = ["queue", "prepare", "restore", "tower", "prefill", "first"];
const ENDED = new Set(["done", "stopped", "failed"]);
const DASH = "–";
const HEARD_MS = 1500; // how long Stop waits for "stopping" before it interrupts the kernel: the control comm works,
const UNHEARD_MS = 300; // or nothing was ever heard through it
const SILENT_MS = 5000; // the kernel says something every second while a run goes on
const MOST_NODES = 8000; // of one reply; the oldest go first, the record keeps them

const number = new Intl.NumberFormat("en-US");
const count = (n) => (n == null ? DASH : number.format(n));
const many = (n, one, more = one + "s") => `${count(n)} ${n === 1 ? one : more}`;
const percent = (x) => (x == null || !isFinite(x) ? DASH : `${Math.round(100 * x)} %`);
const short = (ms) => (ms == null ? DASH : ms === 0 ? "0" : ms < 100 ? ms.toFixed(1) : count(Math.round(ms)));
const seconds = (ms) =>
  ms == null
    ? DASH
    : ms < 60e3
      ? `${(ms / 1e3).toFixed(1)} s`
      : `${Math.floor(ms / 60e3)} min ${Math.floor((ms % 60e3) / 1e3)} s`;

/** An element: `h("div.a.b", {title}, ...children)`. */
function h(what, props = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const el = document.createElement(tag);
  if (classes.length) el.className = classes.join(" ");
  for (const [name, value] of Object.entries(props)) if (value != null) el.setAttribute(name, value);
  el.append(...children.filter((c) => c != null));
  return el;
}

/** Write only what differs, so that nothing is laid out or read aloud for nothing. */
function say(el, text) {
  if (el.textContent !== text) el.textContent = text;
}
function put(el, ...children) {
  const key = children.map((c) => (typeof c === "string" ? c : c.outerHTML)).join("|");
  if (el._key !== key) {
    el._key = key;
    el.replaceChildren(...children);
  }
}

// What the run has told -----------------------------------------------------------------------------

class Story {
  head = {};
  streams = [];
  seq = 0;
  base = 0; // grows when a snapshot replaced the segments, so that views start their text again
  early = new Map(); // frames that came before the one they follow

  clock(elapsed) {
    this.elapsed = elapsed;
    this.heardAt = performance.now();
  }

  /** Milliseconds since the submission, now; as it was when the kernel fell silent. */
  now() {
    if (this.ended) return this.head.total ?? this.elapsed;
    return this.elapsed + (this.silent ? 0 : performance.now() - this.heardAt);
  }

  /** Without an end and without a word for so long, the kernel has gone. */
  get silent() {
    return !this.ended && performance.now() - this.heardAt > SILENT_MS;
  }

  get ended() {
    return ENDED.has(this.head.status);
  }

  get total() {
    return this.streams.reduce((sum, s) => sum + (s.tokens ?? 0), 0);
  }

  frame(frame) {
    if (frame.seq === this.seq) this.clock(frame.elapsed);
    if (frame.seq <= this.seq) return;
    this.early.set(frame.seq, frame);
    while (this.early.has(this.seq + 1)) {
      const next = this.early.get(this.seq + 1);
      this.early.delete(next.seq);
      this.add(next);
    }
  }

  snapshot(state) {
    if (!(state?.seq > this.seq)) return;
    this.base += 1;
    this.streams = [];
    this.head = {};
    this.add(state);
    for (const seq of [...this.early.keys()].sort((a, b) => a - b)) {
      const frame = this.early.get(seq);
      this.early.delete(seq);
      this.frame(frame);
    }
  }

  add({ seq, elapsed, head, streams }) {
    this.seq = seq;
    this.clock(elapsed);
    Object.assign(this.head, head);
    for (const [i, { segments = [], bars = [], ...fields }] of Object.entries(streams)) {
      const stream = (this.streams[i] ??= { segments: [], bars: [] });
      for (const segment of segments) stream.segments.push(segment);
      stream.bars = [...stream.bars, ...bars].slice(-120);
      Object.assign(stream, fields);
    }
  }
}

// The parts of the panel ----------------------------------------------------------------------------

/** A tile: what it answers, the number, a bar, a caption. */
class Tile {
  constructor(name, hint) {
    this.value = h("div.tfm-value");
    this.bar = h("div.tfm-bar", { "aria-hidden": "true" });
    this.cap = h("div.tfm-cap");
    this.el = h(
      "div",
      { role: "group", "aria-label": name, title: hint },
      h("div.tfm-key", {}, name),
      this.value,
      this.bar,
      this.cap,
    );
  }

  draw(value, unit, bars, ...caption) {
    put(this.value, value, " ", h("small", {}, unit));
    put(
      this.bar,
      ...bars
        .filter(([, share]) => share > 0)
        .map(([kind, share]) => h(`i.of-${kind}`, { style: `flex: 0 1 ${(100 * share).toFixed(2)}%` })),
    );
    put(this.cap, ...caption);
  }
}

/** What the first token waits for. */
function waiting({ status, position, rows, prefilled }) {
  if (status === "prefill") return `prompt pass at row ${count(prefilled)} of ${count(rows)}`;
  if (status !== "queued") return ENDED.has(status) ? "no token came" : status;
  if (rows != null) return "prompt prepared";
  return position > 0 ? `queued, ${position} ahead` : "preparing the prompt";
}

function drawFirst(tile, story) {
  const { ttft = {} } = story.head;
  if (ttft.total == null) {
    const [value, unit] = story.ended
      ? [DASH, ""]
      : [(story.now() / 1e3).toFixed(1), story.silent ? "s" : "s and counting"];
    return tile.draw(value, unit, [], waiting(story.head));
  }
  const long = ttft.total >= 10_000;
  const parts = PARTS.map((part) =>
    h("span", {}, ...(ttft[part] >= 0.05 ? [h(`s.of-${part}`)] : []), `${part} ${short(ttft[part])}`),
  );
  tile.draw(
    long ? (ttft.total / 1e3).toFixed(1) : short(ttft.total),
    long ? "s" : "ms",
    PARTS.map((part) => [part, (ttft[part] ?? 0) / ttft.total]),
    h("div.tfm-legend", {}, ...parts),
  );
}

function drawCache(tile, story) {
  const { cached, rows, source, prefilled, settled, miss } = story.head;
  if (cached == null || rows == null) return tile.draw(DASH, rows == null ? "" : `of ${many(rows, "row")}`, [], "");
  const sources = { ram: "from RAM", disk: "from disk", exact: "from RAM, the whole prompt" };
  const from = `${sources[source] ?? "no kept state matched"}${settled ? `, ${count(settled)} settled while idle` : ""}`;
  const work = `${many(rows - cached, "row")} ${prefilled < rows ? "to compute" : "computed"}`;
  const bars = [["cached", cached / rows]];
  tile.draw(count(cached), `of ${many(rows, "row")}`, bars, `${from}; ${work}${miss ? ` · ${miss}` : ""}`);
}

function drawTower(tile, story) {
  const { tower, kept, encoded, pictures = [], rows } = story.head;
  const n = pictures.length;
  const shares = { kept: n ? kept / n : 0, encoded: n ? encoded / n : 0 };
  let words = kept == null ? many(n, "picture") : `${many(kept, "picture")} kept, ${encoded} encoded`;
  if (!n) words = rows == null ? "" : "no pictures in the prompt";
  tile.draw(count(tower), tower === 1 ? "call" : "calls", Object.entries(shares), words);
}

function drawDrafts(tile, story) {
  const { drafts = {}, draft } = story.head;
  const [rounds, drafted, accepted] = Object.values(drafts).reduce((sum, d) => sum.map((x, i) => x + d[i]), [0, 0, 0]);
  const by = Object.entries(drafts)
    .filter(([, d]) => d[1] > 0)
    .map(([name, d]) => `${{ copy: "copies" }[name] ?? name} ${percent(d[2] / d[1])}`);
  let words = by.join(", ") || (rounds ? "nothing drafted yet" : "");
  if (draft === "off") words = "drafting is off";
  tile.draw(
    percent(drafted ? accepted / drafted : null),
    rounds ? `${(1 + accepted / rounds).toFixed(1)} tokens a round` : "",
    [["done", drafted ? accepted / drafted : 0]],
    words,
  );
}

/** The prompt, row by row. */
class Strip {
  constructor() {
    this.cached = h("i.of-cached");
    this.done = h("i.of-done");
    this.todo = h("i.of-todo");
    this.mark = h("i.tfm-mark");
    this.strip = h("div.tfm-strip", { role: "img" }, this.cached, this.done, this.todo);
    this.cap = h("div.tfm-cap.tfm-legend");
    this.el = h("div.tfm-prompt", {}, h("div.tfm-key", {}, "Prompt, row by row"), this.strip, this.cap);
    this.pictures = [];
  }

  draw({ rows, cached, prefilled = 0, pictures = [] }) {
    const at = (row) => `${rows ? (100 * row) / rows : 0}%`;
    const span = (el, from, to) => {
      el.style.left = at(from);
      el.style.width = at(Math.max(0, to - from));
    };
    const from = cached ?? 0,
      reached = Math.max(from, prefilled);
    span(this.cached, 0, from);
    span(this.done, from, reached);
    span(this.todo, reached, rows ?? 0);
    if (pictures.length !== this.pictures.length) {
      this.pictures.forEach((el) => el.remove());
      this.pictures = pictures.map(() => this.strip.appendChild(h("div")));
      this.strip.append(this.mark);
    }
    pictures.forEach(([name, width, height, start, tokens, kept], i) => {
      const fate = kept == null ? "" : kept ? "kept" : "encoded";
      const el = this.pictures[i];
      el.className = `tfm-picture of-${fate || "none"}`;
      span(el, start, start + tokens);
      el.title = `${name}, ${width} × ${height}, rows ${count(start)} to ${count(start + tokens - 1)}${fate && `, ${fate}`}`;
      put(el, h("span", {}, h("em", {}, `picture ${i + 1}${fate && " "}`), fate));
    });
    this.mark.style.left = at(from);
    this.mark.hidden = !cached;
    const key = (kind, words) => h("span", {}, h(`s.of-${kind}`), words);
    const words =
      rows == null
        ? ["its rows are not known yet"]
        : [
            cached ? key("cached", `${count(cached)} from cache`) : null,
            reached > from ? key("done", `${count(reached - from)} computed`) : null,
            rows > reached ? key("todo", `${count(rows - reached)} to do`) : null,
            pictures.some((p) => p[5] === true) ? key("kept", "picture kept") : null,
            pictures.some((p) => p[5] === false) ? key("encoded", "picture encoded") : null,
            cached ? h("span", {}, `resumed at row ${count(cached)}`) : null,
          ].filter(Boolean);
    put(this.cap, ...words);
    this.strip.setAttribute(
      "aria-label",
      rows == null
        ? "prompt"
        : `prompt of ${rows} rows: ${cached ?? 0} from cache, ${reached - from} computed, ${rows - reached} to do; ${many(pictures.length, "picture")}`,
    );
  }
}

const SVG = "http://www.w3.org/2000/svg";
const bar = (x, width, bottom, height) =>
  height > 0 ? `M${x} ${bottom}h${width}v${-height.toFixed(2)}h${-width}z` : "";

/** A small bar chart: one path a kind of bar, so that a frame writes a few attributes however many bars there are. */
class Chart {
  constructor(height, kinds, caption) {
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("height", height);
    this.floor = this.path("base");
    this.paths = kinds.map((kind) => this.path(kind));
    this.el = h("figure", {}, this.svg, h("figcaption.tfm-legend", {}, ...caption));
    this.width = 216;
  }

  path(kind) {
    const el = this.svg.appendChild(document.createElementNS(SVG, "path"));
    el.setAttribute("class", kind);
    return el;
  }

  measure() {
    this.width = this.el.clientWidth || this.width;
    this.svg.setAttribute("width", this.width);
    this.floor.setAttribute("d", `M0 33.5h${this.width}v1H0z`);
  }

  draw(label, ...shapes) {
    shapes.forEach((bars, i) => this.paths[i].setAttribute("d", bars.join("")));
    this.svg.setAttribute("aria-label", label);
  }
}

/** A segment's nodes. The space before a drafted word stays bare, so that marks begin and end with words. */
function piece(kind, text) {
  const space = text.match(/^\s*/)[0],
    word = text.slice(space.length);
  if (kind === "d" && word) return [space, h("mark", { title: "drafted and accepted" }, word)];
  if (kind === "c" && word) return [space, h("mark.c", { title: "copied and accepted" }, word)];
  if (kind === "x") return [h("del", { title: "drafted and rejected" }, text)];
  if (kind === "e") return [h("span.e", {}, ` … ${count(+text)} characters, kept in the record … `)];
  return [text];
}

/** One reply: its tokens by how each was made, its rounds, its acceptance. */
class Reply {
  constructor(i, alone) {
    this.text = h("div.tfm-text", {
      tabindex: "0",
      role: "group",
      "aria-label": `Reply ${i + 1}`,
      "data-live": "true",
      "data-lm-suppress-shortcuts": "true",
      "data-testid": `tfm-text-${i}`,
    });
    this.dot = h("span.tfm-dot", { "aria-hidden": "true" });
    this.facts = h("span.tfm-dim");
    this.name = h("div.tfm-name", {}, this.dot, h("b", {}, alone ? "Reply" : `Stream ${i + 1}`), this.facts);
    const key = (kind, words) => h("span", {}, h(`s.of-${kind}`), words);
    this.places = new Chart(46, ["track", "made"], ["accepted, by draft position"]);
    this.rounds = new Chart(
      35,
      ["drafted", "made", "copied"],
      ["rounds", key("queue", "drafted"), key("done", "accepted"), key("copied", "copied")],
    );
    this.charts = h("div.tfm-charts", {}, this.places.el, this.rounds.el);
    this.el = h(
      "div.tfm-stream",
      { role: "group", "aria-label": `Stream ${i + 1}` },
      this.name,
      this.text,
      this.charts,
    );
    this.drawn = 0;
    this.shownBase = -1;
  }

  draw(stream, story) {
    this.append(stream, story.base);
    this.places.el.hidden = story.head.draft === "off";
    const state = stream.finish
      ? { stop: "done", length: "done", cancelled: "stopped", error: "failed" }[stream.finish]
      : story.head.status;
    this.name.dataset.state = state;
    this.text.dataset.live = String(!stream.finish && !story.ended);
    const end =
      stream.finish === "length" ? "token limit" : story.head.count > 1 && state !== story.head.status ? state : null;
    const facts = [
      stream.speed == null ? `${DASH} tok/s` : `${count(Math.round(stream.speed))} tok/s`,
      many(stream.rounds ?? 0, "round"),
      end,
    ];
    say(this.facts, facts.filter(Boolean).join(" · "));
    this.name.title = `${state}, ${stream.seed == null ? "greedy" : `seed ${stream.seed}`}`;
    this.place(stream.positions ?? []);
    this.round(stream.bars);
  }

  append(stream, base) {
    if (base !== this.shownBase) {
      this.text.replaceChildren();
      this.drawn = 0;
      this.shownBase = base;
    }
    if (this.drawn === stream.segments.length) return;
    const follow = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 24;
    for (const node of stream.segments.slice(this.drawn).flatMap(([kind, text]) => piece(kind, text))) {
      const last = this.text.lastChild;
      if (typeof node === "string" && last?.nodeType === Node.TEXT_NODE) last.appendData(node);
      else this.text.append(node);
    }
    this.drawn = stream.segments.length;
    while (this.text.childNodes.length > MOST_NODES) this.text.firstChild.remove();
    if (follow) this.text.scrollTop = this.text.scrollHeight;
  }

  /** Learn the charts' widths; a draw follows. */
  measure() {
    this.places.measure();
    this.rounds.measure();
    this.placed = null;
  }

  place(shares) {
    const key = shares.join();
    if (this.placed === key) return;
    this.placed = key;
    const { svg, width: room } = this.places;
    const pitch = Math.min(20, room / Math.max(1, shares.length)),
      width = pitch - Math.min(4, pitch / 4);
    const label = shares.length ? `accepted by draft position: ${shares.map(percent).join(", ")}` : "no drafts yet";
    this.places.draw(
      label,
      shares.map((_, k) => bar(k * pitch, width, 34, 34)),
      shares.map((share, k) => bar(k * pitch, width, 34, 34 * share)),
    );
    svg.querySelectorAll("text").forEach((el) => el.remove());
    const step = Math.ceil(14 / pitch);
    for (let k = 0; k < shares.length; k += step) {
      const el = svg.appendChild(document.createElementNS(SVG, "text"));
      el.setAttribute("x", k * pitch + width / 2);
      el.setAttribute("y", 45);
      el.textContent = String(k + 1);
    }
  }

  round(bars) {
    const shown = bars.slice(-Math.floor(this.rounds.width / 6)),
      most = Math.max(4, ...shown.map((b) => b[0]));
    const columns = (value) => shown.map((b, k) => bar(6 * k, 4, 34, (32 * value(b)) / most));
    this.rounds.draw(
      `drafted and accepted rows of the last ${many(shown.length, "round")}`,
      columns((b) => Math.max(b[0], most / 16)),
      columns((b) => (b[2] ? 0 : b[1])),
      columns((b) => (b[2] ? b[1] : 0)),
    );
  }
}

/** The whole panel in one view. */
class Panel {
  constructor(story, stop) {
    this.story = story;
    this.dot = h("span.tfm-dot", { "aria-hidden": "true" });
    this.state = h("b", { "data-testid": "tfm-state" });
    this.about = h("span.tfm-about");
    this.clock = h("span.tfm-dim", { "aria-hidden": "true" });
    this.stop = h(
      "button.tfm-stop",
      { type: "button", "data-testid": "tfm-stop", "data-lm-suppress-shortcuts": "true" },
      "Stop",
    );
    this.stop.onclick = stop;
    this.first = new Tile("Time to first token", "submit → first token delivered; the parts add up to it");
    this.cache = new Tile("Prompt from cache", "prompt rows not recomputed");
    this.tower = new Tile("Vision tower", "vision-tower runs; pictures encoded, and pictures spared by the kept state");
    this.drafts = new Tile(
      "Drafts accepted",
      "draft rows accepted / draft rows verified; a round gives 1 + accepted tokens",
    );
    this.strip = new Strip();
    this.says = h("div.tfm-says", { hidden: "" });
    this.ghosts = h(
      "button.tfm-ghosts",
      { type: "button", "aria-pressed": "false", "data-testid": "tfm-ghosts", "data-lm-suppress-shortcuts": "true" },
      "Rejected drafts",
    );
    this.ghosts.onclick = () => this.ghosts.setAttribute("aria-pressed", String(this.el.classList.toggle("ghosts")));
    const swatch = (...x) => h("span", {}, h("span.tfm-swatch", {}, ...x));
    this.legend = h(
      "div.tfm-key-row",
      {},
      h("span", {}, "Tokens"),
      swatch(h("mark", {}, "drafted and accepted")),
      swatch(h("mark.c", {}, "copied and accepted")),
      swatch("plain"),
      this.ghosts,
    );
    this.streams = h("div.tfm-streams");
    this.status = h("div.tfm-hush", { role: "status" });
    this.head = h("div.tfm-head", {}, this.dot, this.state, this.about, this.clock, this.stop);
    const tiles = h("div.tfm-tiles", {}, this.first.el, this.cache.el, this.tower.el, this.drafts.el);
    this.el = h(
      "div.tfm",
      { role: "group", "aria-label": "Run", "data-testid": "tfm-panel" },
      this.head,
      tiles,
      this.strip.el,
      this.says,
      this.legend,
      this.streams,
      this.status,
    );
    this.replies = [];
  }

  /** After a change of the panel's width. */
  measure() {
    this.replies.forEach((reply) => reply.measure());
  }

  draw() {
    const { story } = this,
      { head } = story;
    this.head.dataset.state = this.el.dataset.status = head.status;
    this.el.dataset.tokens = story.total;
    say(this.state, head.status ?? "");
    const about = [
      head.model,
      head.device,
      head.chat && `chat “${head.chat}”`,
      head.chat && `turn ${head.turn}`,
      head.count > 1 && `${head.count} streams`,
    ];
    say(this.about, about.filter(Boolean).join(" · "));
    this.about.title = this.about.textContent;
    this.stop.hidden = story.ended;
    this.stop.disabled = head.status === "stopping";
    drawFirst(this.first, story);
    this.tick();
    drawCache(this.cache, story);
    drawTower(this.tower, story);
    drawDrafts(this.drafts, story);
    this.strip.draw(head);
    this.drawReplies();
    this.announce();
  }

  /** What moves with the clock alone. */
  tick() {
    const { story } = this,
      { head } = story;
    say(this.clock, seconds(story.now()));
    if (head.ttft?.total == null) drawFirst(this.first, story);
    const words =
      head.error ??
      (story.silent
        ? `No word from the kernel since then. If it was restarted, %tfold show ${head.run} shows this run.`
        : head.note);
    this.says.hidden = !words;
    this.says.classList.toggle("bad", Boolean(head.error || story.silent));
    say(this.says, words ?? "");
  }

  drawReplies() {
    const { story } = this,
      n = story.head.count ?? 0;
    while (this.replies.length < n) {
      this.replies.push(new Reply(this.replies.length, n === 1));
      this.streams.append(this.replies.at(-1).el);
      this.streams.dataset.count = n > 4 ? "more" : n;
      this.replies.at(-1).measure();
    }
    this.legend.hidden = story.head.draft === "off";
    story.streams.forEach((stream, i) => this.replies[i]?.draw(stream, story));
  }

  /** One sentence when the state changes, for who listens. */
  announce() {
    const { head, total } = this.story;
    const said = {
      queued: "Queued",
      prefill: "Reading the prompt",
      decoding: "Replying",
      stopping: "Stopping",
      failed: `Failed. ${head.error ?? ""}`,
    }[head.status];
    say(
      this.status,
      said ?? `${head.status === "stopped" ? "Stopped" : "Done"}: ${many(total, "token")} in ${seconds(head.total)}`,
    );
  }
}

// The way back to the kernel ------------------------------------------------------------------------

/**
 * One control comm for each kernel connection, shared by every panel of the page and never closed: with its last comm
 * the shell that JupyterLab gave this target would end.
 */
const comms = (globalThis[Symbol.for(CONTROL)] ??= new WeakMap());

async function controlOf(kernel) {
  const known = await comms.get(kernel);
  if (known && !known.isDisposed) return known;
  const opened = (async () => {
    const comm = kernel.createComm(CONTROL);
    // Where comms have a shell of their own, wait for it: the cell keeps the main shell busy.
    await Promise.race([comm.subshellStarted, new Promise((go) => setTimeout(go, 500))]);
    comm.open({});
    return comm;
  })().catch(() => null); // another page's kernel may have no comms; the other ways remain
  comms.set(kernel, opened);
  return opened;
}

/** Tells the kernel `hello`, `stop` and `gone`; see `_heard` in live.py. */
class Control {
  constructor(model, story) {
    this.model = model;
    this.story = story;
  }

  get kernel() {
    return this.model.widget_manager?.kernel ?? null;
  }

  async hello() {
    this.comm = this.kernel && (await controlOf(this.kernel));
    this.comm?.send({ op: "hello", panel: this.story.head.panel });
  }

  tell(op) {
    const message = { op, panel: this.story.head.panel };
    if (this.comm && !this.comm.isDisposed) this.comm.send(message);
    else this.model.send(message);
  }

  /** The ladder: the control comm; a kernel interrupt if the run does not turn to stopping; a widget message. */
  stop() {
    const { story } = this;
    this.tell("stop");
    const answered = () => story.ended || story.head.status === "stopping";
    setTimeout(
      () => {
        if (answered()) return;
        if (!story.head.background && this.kernel?.interrupt) this.kernel.interrupt().catch(() => {});
        else this.model.send({ op: "stop", panel: story.head.panel });
      },
      story.head.heard ? HEARD_MS : UNHEARD_MS,
    );
  }
}

/** Put the card in the place of this widget's output in the notebook, as the update would have that a reload lost. */
function settle(model, card) {
  const cells = model.widget_manager?.context?.model?.cells;
  let done = false;
  for (const cell of cells ?? []) {
    for (let i = 0; i < (cell.outputs?.length ?? 0); i++) {
      const output = cell.outputs.get(i);
      if (output.data?.[VIEW]?.model_id !== card.widget) continue;
      cell.outputs.set(i, {
        output_type: "display_data",
        data: { "text/html": card.html, "text/plain": card.text },
        metadata: {},
      });
      done = true;
    }
  }
  return done;
}

export default () => {
  const story = new Story();
  let control,
    views = 0;

  return {
    initialize({ model }) {
      control = new Control(model, story);
      story.snapshot(model.get("state"));
      model.on("msg:custom", (frame) => story.frame(frame));
      model.on("change:state", () => story.snapshot(model.get("state")));
      if (!story.ended) control.hello().catch(() => {});
    },

    render({ model, el }) {
      const panel = new Panel(story, () => {
        panel.stop.disabled = true;
        control.stop();
      });
      const calm = matchMedia("(prefers-reduced-motion: reduce)");
      let asked = 0,
        seen = true,
        timer = 0,
        wide = 0;
      views += 1;
      el.append(panel.el);

      const draw = () => {
        if (asked || document.hidden || !seen) return;
        asked = requestAnimationFrame(() => {
          asked = 0;
          panel.draw();
        });
      };
      const clock = () => {
        if (!document.hidden && seen && !story.ended) panel.tick();
        timer = story.ended ? 0 : setTimeout(clock, calm.matches ? 1000 : 100);
      };
      const watcher = new IntersectionObserver(([entry]) => {
        seen = entry.isIntersecting;
        draw();
      });
      const over = () => {
        const card = model.get("card");
        if (!card?.html) return;
        if (!settle(model, card)) el.innerHTML = card.html;
      };
      const sizes = new ResizeObserver(([entry]) => {
        if (wide === entry.contentRect.width) return;
        wide = entry.contentRect.width;
        panel.measure();
        draw();
      });
      model.on("msg:custom", draw);
      model.on("change:state", draw);
      // The display's own update comes right behind the card; only where it was lost is this needed.
      model.on("change:card", () => setTimeout(() => el.isConnected && over(), 1500));
      document.addEventListener("visibilitychange", draw);
      watcher.observe(el);
      sizes.observe(el);
      panel.draw();
      clock();
      if (model.get("card")?.html) over();

      return () => {
        views -= 1;
        clearTimeout(timer);
        cancelAnimationFrame(asked);
        watcher.disconnect();
        sizes.disconnect();
        document.removeEventListener("visibilitychange", draw);
        if (!views && model.get("card")?.html) control.tell("gone");
      };
    },
  };
};

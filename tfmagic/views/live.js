// The live panel of a run (see live.py for the two channels that feed it).
//
// One `Story` a widget keeps what the run has told, outside the page; each view draws it: what is new since the view's
// last drawing, in one animation frame, never the whole token list again. A frame carries, besides its sequence number,
//   head     the run's fields that changed           (names: `head_of` in frames.py)
//   streams  { i: { segments, bars, trees, ...fields } }
//            segments [kind, text]; bars and trees: the last rounds, as frames.py tells them
// and a snapshot has the same form with everything in it. Other rounds the page asks for.

const CONTROL = "tfmagic.control";
const VIEW = "application/vnd.jupyter.widget-view+json";
const PARTS = ["queue", "prepare", "restore", "tower", "prefill", "first"];
const ENDED = new Set(["done", "stopped", "failed"]);
const DASH = "–";
const HEARD_MS = 1500; // how long Stop waits for "stopping" before it interrupts the kernel: the control comm works,
const UNHEARD_MS = 300; // or nothing was ever heard through it
const SILENT_MS = 5000; // the kernel says something every second while a run goes on
const MOST_NODES = 8000; // of one reply; the oldest go first, the record keeps them
const MOST_ROUNDS = 2000; // of one stream; others can be asked for again
const PITCH = 8; // pixels from one round's bar to the next
const GAP = 18; // and from one box of a tree to the next
const MARKS = { tree: "▲", block: "■", copy: "=" }; // below a round's bar

const number = new Intl.NumberFormat("en-US");
const count = (n) => (n == null ? DASH : number.format(n));
const many = (n, one, more = one + "s") => `${count(n)} ${n === 1 ? one : more}`;
const percent = (x) => (x == null || !isFinite(x) ? DASH : `${Math.round(100 * x)}\u00a0%`);
const times = (x) => (x == null ? DASH : `×${x.toFixed(x < 1.995 ? 2 : 1)}`);
const short = (ms) => (ms == null ? DASH : ms === 0 ? "0" : ms < 100 ? ms.toFixed(1) : count(Math.round(ms)));
const seconds = (ms) =>
  ms == null
    ? DASH
    : ms < 60e3
      ? `${(ms / 1e3).toFixed(1)} s`
      : `${Math.floor(ms / 60e3)} min ${Math.floor((ms % 60e3) / 1e3)} s`;

const KEYS = { "data-lm-suppress-shortcuts": "true" }; // of the notebook

/** An element: `h("div.a.b", {title}, ...children)`. */
function h(what, props = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const el = document.createElement(tag);
  if (classes.length) el.className = classes.join(" ");
  for (const [name, value] of Object.entries(props)) if (value != null) el.setAttribute(name, value);
  el.append(...children.filter((c) => c != null));
  return el;
}

/** A colour and what it means. */
const key = (kind, words) => h("span", {}, h(`s.of-${kind}`), words);

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
    this.before = this.streams; // whose rounds stay known
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
    for (const [i, { segments = [], bars = [], trees = [], ...fields }] of Object.entries(streams)) {
      const stream = (this.streams[i] ??= { segments: [], known: this.before?.[i]?.known ?? new Map(), asked: new Map() });
      for (const segment of segments) stream.segments.push(segment);
      Object.assign(stream, fields);
      learn(stream, stream.rounds, bars, trees);
    }
  }

  /** An answer of the kernel's: rounds that this page asked for. */
  answer({ stream: i, end, bars, trees }) {
    if (this.streams[i]) learn(this.streams[i], end, bars, trees);
  }

  /** What is known of a round; the kernel is asked for the rest, not twice within some seconds. */
  look(i, k) {
    const stream = this.streams[i],
      now = performance.now(),
      place = Math.floor(k / 8);
    const round = stream.known.get(k) ?? {};
    if (!round.tree && !(now - stream.asked.get(place) < SILENT_MS)) {
      stream.asked.set(place, now);
      this.ask?.(i, k);
    }
    return round;
  }
}

/** Take in bars and trees of which the last belong to the round before `end`. */
function learn(stream, end, bars, trees) {
  const set = (k, part) => stream.known.set(k, { ...stream.known.get(k), ...part });
  stream.seen ??= new Set();
  bars.forEach((bar, j) => {
    set(end - bars.length + j, { bar });
    if (bar[0]) stream.seen.add(bar[2]);
    if (bar[3]) stream.seen.add("cut");
  });
  trees.forEach((tree, j) => set(end - trees.length + j, { tree }));
  for (const k of stream.known.keys()) {
    if (stream.known.size <= MOST_ROUNDS) break;
    stream.known.delete(k);
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
  const { drafts = {}, draft, cut, speedup: [true_, expected] = [] } = story.head;
  const [rounds, drafted, accepted] = Object.values(drafts).reduce((sum, d) => sum.map((x, i) => x + d[i]), [0, 0, 0]);
  const by = Object.entries(drafts)
    .filter(([, d]) => d[1] > 0)
    .map(([name, d]) => `${{ copy: "copies" }[name] ?? name} ${percent(d[2] / d[1])}`);
  const words = [by.join(", ") || (rounds ? "nothing drafted yet" : "")];
  if (drafted) {
    const how = true_ == null ? " speed-up" : true_ >= 0.995 ? " faster" : ", slower";
    words.push(`${times(true_)}${how} (expected ${times(expected)})`);
  }
  if (cut) words.push(`${many(cut, "row")} cut`);
  if (draft === "off") words.splice(0, 9, "drafting is off");
  tile.draw(
    percent(drafted ? accepted / drafted : null),
    rounds ? `${(1 + accepted / rounds).toFixed(1)} tokens a round` : "",
    [["done", drafted ? accepted / drafted : 0]],
    ...words.flatMap((word, i) => [i ? " · " : "", h("span", {}, word)]),
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

function shape(name, props, ...children) {
  const el = document.createElementNS(SVG, name);
  for (const [prop, value] of Object.entries(props)) el.setAttribute(prop, value);
  el.append(...children);
  return el;
}

/** A small bar chart: one path a kind of bar, so that a frame writes a few attributes however many bars there are. */
class Chart {
  width = 216;

  constructor(kinds, props) {
    this.floor = shape("path", { class: "base" });
    this.paths = kinds.map((kind) => shape("path", { class: kind }));
    this.svg = shape("svg", { height: 46, ...props }, this.floor, ...this.paths);
  }

  measure() {
    this.width = this.el.clientWidth || this.width;
    this.svg.setAttribute("width", this.width);
    this.floor.setAttribute("d", `M0 33.5h${this.width}v1H0z`);
  }

  fill(...shapes) {
    shapes.forEach((d, i) => this.paths[i].setAttribute("d", d));
  }
}

/** Which share of the drafts was accepted, by position. */
class Places extends Chart {
  constructor() {
    super(["track", "made"], { role: "img" });
    this.el = h("figure", {}, this.svg, h("figcaption", {}, "accepted, by draft position"));
  }

  draw(shares) {
    const key = shares.join() + this.width;
    if (this.drawn === key) return;
    this.drawn = key;
    const pitch = Math.min(20, this.width / Math.max(1, shares.length)),
      width = pitch - Math.min(4, pitch / 4),
      columns = (share) => shares.map((x, k) => bar(k * pitch, width, 34, 34 * share(x))).join("");
    this.fill(columns(() => 1), columns((x) => x));
    this.svg.setAttribute(
      "aria-label",
      shares.length ? `accepted by draft position: ${shares.map(percent).join(", ")}` : "no drafts yet",
    );
    this.svg.querySelectorAll("text").forEach((el) => el.remove());
    for (let k = 0; k < shares.length; k += Math.ceil(14 / pitch))
      this.svg.append(shape("text", { x: k * pitch + width / 2, y: 45 }, String(k + 1)));
  }
}

/** A token in a tree: one line. */
const label = (piece) => piece.replace(/^ +| +$/g, "").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "␣";

/** What is to be said of a round, in parts: [its rows, its tokens, its times]. */
function tellRound({ bar, tree }) {
  const [drafted, accepted, source, cut, committed] = bar;
  const rows = `${source}, ${many(drafted, "row")} drafted, ${accepted} accepted${cut ? `, ${cut} cut` : ""}`;
  const parts = ["draft", "verify", "commit"].map((part, i) => `${part} ${short(tree.ms[i])}`);
  return [
    drafted ? rows : "undrafted",
    drafted ? `expected ${tree.expected?.toFixed(1) ?? DASH} tokens, gave ${committed}` : `gave ${many(committed, "token")}`,
    tree.ms.some((ms) => ms != null) ? `${parts.join(" · ")} ms` : null,
  ].filter(Boolean);
}

/** The same as a sentence. */
function sayRound(k, n, round) {
  if (!round.tree || !round.bar) return `round ${k + 1} of ${n}, not here yet`;
  const { tree } = round,
    text = (rows) => rows.map((row) => tree.pieces[row - 1]).join("");
  const taken = tree.taken.length ? `accepted “${text(tree.taken)}”` : tree.pieces.length ? "none accepted" : null;
  const own = tree.own == null ? null : `then drew “${tree.own}”`;
  return [`round ${k + 1} of ${n}`, ...tellRound(round), taken, own].filter(Boolean).join("; ");
}

/** A round's rows as boxes by depth: the pending token, what was guessed behind it, what the round drew itself. */
function drawTree({ pieces, parents, chances, taken, root, own }, copied, room) {
  const nodes = [{ text: label(root), kind: "root", up: -1 }];
  pieces.forEach((piece, i) => {
    const kind = !taken.includes(i + 1) ? "out" : copied ? "copied" : "in";
    nodes.push({ text: label(piece), chance: chances[i], kind, up: parents[i] });
  });
  if (own != null) nodes.push({ text: label(own), kind: "own", up: taken.at(-1) ?? 0 });
  const widths = [];
  for (const node of nodes) {
    node.depth = node.up < 0 ? 0 : nodes[node.up].depth + 1;
    node.below = [];
    if (node.up >= 0) nodes[node.up].below.push(node);
    const letters = [...node.text].reduce((sum, c) => sum + (c > "\u2e80" ? 11 : 6.6), 0);
    node.width = letters + (node.chance == null ? 12 : 14 + 5.6 * String(node.chance).length);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const columns = widths.map((_, d) => 2 + widths.slice(0, d).reduce((sum, w) => sum + w + GAP, 0));
  const chain = nodes.every(({ below }) => below.length < 2);
  let y = 2,
    x = 2;
  const set = (node) => {
    if (chain && x + node.width > room && node.depth) [x, y] = [2 + GAP, y + 22];
    Object.assign(node, { y, x: chain ? x : columns[node.depth] });
    x += node.width + GAP;
    node.below.forEach((child, i) => {
      if (i) y += 22;
      set(child);
    });
  };
  set(nodes[0]);
  const width = Math.max(...nodes.map((node) => node.x + node.width)) + 2;
  const svg = shape("svg", { width, height: y + 20, "aria-hidden": "true" });
  const edges = nodes.slice(1).sort((a, b) => (b.kind === "out") - (a.kind === "out")); // taken ones on top
  for (const { up, x, y, kind, chance } of edges) {
    const from = nodes[up],
      start = from.x + from.width;
    const d = start > x ? `M${x - GAP} ${y + 9}H${x}` : `M${start} ${from.y + 9}H${x - GAP / 2}V${y + 9}H${x}`;
    svg.append(shape("path", { d, class: `edge ${kind}`, "stroke-width": chance == null ? 1 : 0.8 + chance / 32 }));
  }
  for (const { text, kind, chance, x, y, width } of nodes) {
    const words = { root: "the pending token", own: "the round's own draw", out: "rejected" }[kind] ?? "accepted";
    const g = shape("g", { class: kind });
    g.append(
      shape("title", {}, chance == null ? words : `${words}, its chance was ${chance} %`),
      shape("rect", { x, y, width, height: 18, rx: 3 }),
      shape("text", { x: x + 6, y: y + 13 }, text),
    );
    if (chance != null) g.append(shape("text", { x: x + width - 5, y: y + 12.5, class: "chance" }, String(chance)));
    svg.append(g);
  }
  return svg;
}

/** One round: what it did in words, and its tree. `step`: buttons to the rounds beside it. */
function roundView(k, n, round, room, step) {
  const go = (by, words, text) => {
    const el = h("button", { type: "button", "aria-label": words, ...KEYS }, text);
    el.disabled = k + by < 0 || k + by >= n;
    el.onclick = () => step(k + by);
    return el;
  };
  const head = h("div.tfm-round-head");
  if (step) head.append(go(-1, "earlier round", "‹"), go(1, "later round", "›"));
  head.append(h("b", {}, `Round ${count(k + 1)} of ${count(n)}`));
  if (!round.tree || !round.bar) return [head, h("div.tfm-dim", {}, "asked for; it comes when the kernel has time")];
  for (const words of tellRound(round)) head.append(h("span.tfm-dim", {}, words));
  if (!round.tree.pieces.length) return [head];
  return [head, h("div.tfm-tree", {}, drawTree(round.tree, round.bar[2] === "copy", room))];
}

/** A stream's rounds: a bar each, which shows its tree when pointed at or stepped to. */
class Rounds extends Chart {
  constructor(i, story, peek) {
    super(["mark", "cut", "drafted", "made", "copied", ...Object.keys(MARKS)], { "aria-hidden": "true" });
    Object.assign(this, { i, story, peek });
    this.slider = h(
      "div.tfm-rounds",
      { tabindex: "0", role: "slider", "aria-label": "Round", "aria-valuemin": "1", ...KEYS, "data-testid": `tfm-rounds-${i}` },
      this.svg,
    );
    this.cap = h("figcaption.tfm-legend");
    this.el = h("figure", {}, this.slider, this.cap);
    this.pinned = h("div.tfm-round", { role: "group", "aria-label": "Round" });
    this.pinned.hidden = true;
    this.at = null; // the round that is pinned or stepped to
    Object.assign(this.slider, {
      onpointermove: (event) => this.show(this.under(event)),
      onpointerleave: () => this.show(null),
      onclick: (event) => this.pin(this.under(event), true),
      onkeydown: (event) => this.key(event),
      onfocus: () => this.slider.matches(":focus-visible") && this.show(this.now),
      onblur: () => this.show(null),
    });
  }

  get stream() {
    return this.story.streams[this.i];
  }

  get n() {
    return this.stream?.rounds ?? 0;
  }

  /** The round that a key starts from. */
  get now() {
    return Math.min(this.at ?? this.n - 1, this.n - 1);
  }

  /** The first of the rounds that are drawn: the last ones, or those around the one that was stepped to. */
  get start() {
    const room = Math.max(1, Math.floor(this.width / PITCH)),
      latest = Math.max(0, this.n - room);
    if (this.at == null || this.at >= latest) return latest;
    return Math.max(0, Math.min(latest, this.at - Math.floor(room / 2)));
  }

  under(event) {
    const k = this.start + Math.floor((event.clientX - this.svg.getBoundingClientRect().left) / PITCH);
    return k >= 0 && k < this.n ? k : null;
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 }[event.key];
    const to = { Home: 0, End: this.n - 1 }[event.key] ?? (by && this.now + by);
    if (event.key === "Enter" || event.key === " ") this.pin(this.now, true);
    else if (event.key === "Escape") this.pin(null);
    else if (to != null && this.n) this.step(Math.max(0, Math.min(this.n - 1, to)));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Go to a round: where one is pinned, there; else it is shown for the moment. */
  step(k) {
    if (!this.pinned.hidden) return this.pin(k);
    this.at = k;
    this.draw();
    this.show(k);
  }

  /** Keep a round open below the reply; null: none. */
  pin(k, toggle = false) {
    this.at = toggle && !this.pinned.hidden && k === this.at ? null : k;
    this.pinned.hidden = this.at == null;
    this.show(null);
    this.draw();
  }

  show(k) {
    const open = k != null && this.n && !(k === this.at && !this.pinned.hidden);
    const round = open && this.story.look(this.i, k);
    this.peek.show(open && roundView(k, this.n, round, Math.min(900, innerWidth - 20) - 26), this.slider);
    this.awaited = open && !round.tree ? k : null;
  }

  draw() {
    if (!this.stream) return;
    const start = this.start,
      shown = [];
    for (let k = start; k < this.n && k - start < Math.floor(this.width / PITCH); k++)
      shown.push(this.stream.known.get(k)?.bar ?? this.story.look(this.i, k).bar);
    const most = Math.min(24, Math.max(4, ...shown.map((b) => (b ? b[0] + b[3] : 0))));
    const tall = (rows) => (32 * Math.min(rows, most)) / most;
    const columns = (value, from = () => 0) =>
      shown.map((b, j) => (b ? bar(PITCH * j, PITCH - 2, 34 - tall(from(b)), tall(value(b))) : "")).join("");
    const under = (source, mark) =>
      shown.map((b, j) => (b?.[2] === source && b[0] ? `M${PITCH * j} 37${mark}` : "")).join("");
    const at = PITCH * (this.at - start) - 1.5;
    this.fill(
      this.at == null ? "" : `M${at} 0h${PITCH + 1}v45.5h-${PITCH + 1}z`,
      columns((b) => Math.max(0, Math.min(b[3], most - b[0])), (b) => b[0]),
      columns((b) => Math.max(b[0], most / 16)),
      columns((b) => (b[2] === "copy" ? 0 : b[1])),
      columns((b) => (b[2] === "copy" ? b[1] : 0)),
      under("tree", "m3 0l3 6h-6z"),
      under("block", "h6v6h-6z"),
      under("copy", "h6v2h-6zm0 4h6v2h-6z"),
    );
    this.legend();
    this.words();
    if (this.awaited != null) this.show(this.awaited);
  }

  legend() {
    const { seen } = this.stream,
      sources = Object.entries(MARKS).filter(([source]) => seen.has(source));
    const rows = [key("done", "accepted"), key("queue", "rejected"), seen.has("cut") ? key("cut", "cut") : ""];
    put(this.cap, "rounds", ...(seen.size ? rows : []), ...sources.map(([source, mark]) => h("span", {}, `${mark} ${source}`)));
  }

  /** The slider's value, and the pinned round. */
  words() {
    const k = this.now,
      n = this.n,
      round = n ? (this.at == null ? this.stream.known.get(k) : this.story.look(this.i, k)) ?? {} : {};
    const value = { valuemax: n, valuenow: k + 1, valuetext: n ? sayRound(k, n, round) : "no rounds yet" };
    for (const [name, words] of Object.entries(value)) this.slider.setAttribute(`aria-${name}`, words);
    if (this.pinned.hidden) return;
    const room = this.pinned.clientWidth - 24,
      key = `${k} ${n} ${Boolean(round.tree)} ${room}`;
    if (this.pinnedKey === key) return;
    this.pinnedKey = key;
    const buttons = () => [...this.pinned.querySelectorAll("button")],
      focus = buttons().indexOf(document.activeElement);
    this.pinned.replaceChildren(...roundView(k, n, round, room, (to) => this.pin(to)));
    if (focus >= 0) (buttons()[focus].disabled ? this.slider : buttons()[focus]).focus();
  }
}

/** What floats beside a bar that is pointed at. */
class Peek {
  constructor() {
    this.el = h("div.tfm-peek", { popover: "manual", "aria-hidden": "true" });
  }

  show(children, beside) {
    if (!this.el.isConnected || !this.el.togglePopover) return;
    this.el.togglePopover(Boolean(children));
    if (!children) return;
    this.el.replaceChildren(...children);
    const { left, top, bottom } = beside.getBoundingClientRect(),
      { width, height } = this.el.getBoundingClientRect();
    const above = bottom + height + 8 > innerHeight && top > height + 8;
    this.el.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    this.el.style.top = `${above ? top - height - 8 : bottom + 8}px`;
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
  constructor(i, alone, story, peek) {
    this.text = h("div.tfm-text", {
      tabindex: "0",
      role: "group",
      "aria-label": `Reply ${i + 1}`,
      "data-live": "true",
      ...KEYS,
      "data-testid": `tfm-text-${i}`,
    });
    this.dot = h("span.tfm-dot", { "aria-hidden": "true" });
    this.facts = h("span.tfm-dim");
    this.name = h("div.tfm-name", {}, this.dot, h("b", {}, alone ? "Reply" : `Stream ${i + 1}`), this.facts);
    this.places = new Places();
    this.rounds = new Rounds(i, story, peek);
    this.charts = h("div.tfm-charts", {}, this.places.el, this.rounds.el);
    this.el = h(
      "div.tfm-stream",
      { role: "group", "aria-label": `Stream ${i + 1}` },
      this.name,
      this.text,
      this.charts,
      this.rounds.pinned,
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
    this.places.draw(stream.positions ?? []);
    this.rounds.draw();
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
    this.stop = h("button.tfm-stop", { type: "button", "data-testid": "tfm-stop", ...KEYS }, "Stop");
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
      { type: "button", "aria-pressed": "false", "data-testid": "tfm-ghosts", ...KEYS },
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
    this.peek = new Peek();
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
      this.peek.el,
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
      this.replies.push(new Reply(this.replies.length, n === 1, story, this.peek));
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

  tell(op, more) {
    const message = { op, panel: this.story.head.panel, ...more };
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

const inPlace = ({ html, text }) => ({
  output_type: "display_data",
  data: { "text/html": html, "text/plain": text },
  metadata: {},
});

/** Put the card in the place of this widget's output in the notebook, as the update would have that a reload lost. */
function settle(model, card) {
  let done = false;
  for (const { outputs } of model.widget_manager?.context?.model?.cells ?? []) {
    for (let i = 0; i < (outputs?.length ?? 0); i++) {
      if (outputs.get(i).data?.[VIEW]?.model_id !== card.widget) continue;
      outputs.set(i, inPlace(card));
      done = true;
    }
  }
  return done;
}

/** Let the notebook be saved with the card in this widget's place, while the panel stays on the page. */
function saveAs(model, card) {
  const book = model.widget_manager?.context?.model;
  if (!book?.toJSON) return;
  if (!cards.has(book)) {
    const whole = book.toJSON.bind(book),
      known = new Map();
    cards.set(book, known);
    book.toJSON = () => {
      const json = whole();
      for (const { outputs } of json.cells ?? [])
        outputs?.forEach((output, i) => {
          const card = known.get(output.data?.[VIEW]?.model_id);
          if (card) outputs[i] = inPlace(card);
        });
      return json;
    };
  }
  cards.get(book).set(card.widget, card);
}
const cards = (globalThis[Symbol.for("tfmagic.cards")] ??= new WeakMap());

export default () => {
  const story = new Story();
  let control,
    views = 0;

  return {
    initialize({ model }) {
      control = new Control(model, story);
      story.ask = (stream, round) => control.tell("trees", { stream, round });
      story.snapshot(model.get("state"));
      model.on("msg:custom", (frame) => (frame.asked ? story.answer(frame.asked) : story.frame(frame)));
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
        if (card.later) return saveAs(model, card);
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
      model.on("change:card", () => setTimeout(() => el.isConnected && over(), model.get("card").later ? 0 : 1500));
      document.addEventListener("visibilitychange", draw);
      watcher.observe(el);
      sizes.observe(el);
      panel.draw();
      if (story.ended) panel.replies[0]?.rounds.pin(0); // a finished run, to be stepped through
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

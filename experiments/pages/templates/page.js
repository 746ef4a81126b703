"use strict";
// Draws the curves of each group as SVG: two axes, a band and a line an arm, and what lies under the pointer.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const AXES = { epochs: "epochs", flops: "TFLOP", seconds: "seconds on the device" };
  // What a plot shows: curves over epochs, the ends of whole runs by budget (log₂), or losses by step (log₁₀ upwards).
  const KINDS = {
    epochs: { axis: AXES, up: "accuracy, %", at: "epoch " },
    budgets: { axis: { ...AXES, epochs: "budget in epochs of the big network" }, up: "accuracy, %", at: "budget " },
    steps: { axis: { epochs: "steps after the growth" }, up: "training loss", at: "step " },
  };
  const ACCOUNTS = { nothing: "from nothing", reuse: "reuse" };
  const SVG = "http://www.w3.org/2000/svg";
  let count = 0;

  function make(name, attributes = {}, ...children) {
    const drawn = ["svg", "g", "path", "line", "text", "circle", "clipPath", "rect"].includes(name);
    const element = drawn ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  // A row of radio buttons that looks like one switch.
  function radios(title, options, chosen, change) {
    const name = `r${++count}`;
    const set = make("fieldset", { class: "switch" }, make("legend", {}, title));
    for (const [value, text] of Object.entries(options)) {
      const input = make("input", { type: "radio", name, value });
      input.checked = value === chosen;
      input.addEventListener("change", () => change(value));
      set.append(make("label", {}, input, text));
    }
    return set;
  }

  // About `wanted` round numbers between two others.
  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const found = [];
    for (let n = Math.ceil(low / step); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  }

  // A centred running mean over five entries, narrower at the ends of stages, never over a cut.
  function running(values, cuts) {
    const smooth = values.slice();
    [...cuts, values.length].forEach((end, number, all) => {
      const start = number ? all[number - 1] : 0;
      for (let i = start; i < end; i++) {
        const reach = Math.min(2, i - start, end - 1 - i);
        let sum = 0;
        for (let j = i - reach; j <= i + reach; j++) sum += values[j];
        smooth[i] = sum / (2 * reach + 1);
      }
    });
    return smooth;
  }

  // The last of the entries that are nearest to x: at a growth, the one just after it.
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle - 1;
    }
    if (low + 1 < xs.length && xs[low + 1] - x < x - xs[low]) {
      low++;
      while (low + 1 < xs.length && xs[low + 1] === xs[low]) low++;
    }
    return low;
  }

  function plot(figure) {
    const group = DATA[figure.dataset.group];
    const grows = group.arms.some((arm) => arm.reuse);
    const told = group.arms.some((arm) => arm.nothing);
    const kind = group.kind ?? "epochs", words = KINDS[kind], budgets = kind === "budgets", losses = kind === "steps";
    const first = group.first ?? group.arms.map((arm) => arm.name);
    const state = {
      axis: "epochs", range: group.range ?? "whole", smooth: kind === "epochs", at: null, account: group.account ?? (told ? "nothing" : "reuse"),
      hidden: new Set(group.arms.map((arm) => arm.name).filter((name) => !first.includes(name))),
    };
    const view = figure.querySelector(".view");
    const svg = make("svg", { tabindex: "0", role: "group", "aria-roledescription": "plot" });
    const tip = make("div", { class: "tip", role: "status", "aria-live": "polite", hidden: "" });
    const legend = make("div", { class: "legend", role: "group", "aria-label": `Curves of ${group.title}` });
    let scale = null;

    const curve = (arm) => (arm.both ? within(arm.nothing) : arm[state.account]) ?? null; // `both`: never grown, the same in both accounts
    const label = (arm) => arm.labels?.[state.account] ?? arm.label;
    const short = (arm) => arm.short ?? label(arm);
    // Of a line that both accounts share, the budgets that the account of the plot has.
    function within(line) {
      const others = budgets ? group.arms.flatMap((arm) => (arm.both ? [] : arm[state.account]?.epochs ?? [])) : [];
      if (!line || !others.length) return line;
      const keep = line.epochs.map((budget) => Math.min(...others) <= budget && budget <= Math.max(...others));
      return Object.fromEntries(Object.entries(line).map(([key, values]) => [key, Array.isArray(values) && values.length === keep.length ? values.filter((_, i) => keep[i]) : values]));
    }
    const visible = () => group.arms.filter((arm) => !state.hidden.has(arm.name) && curve(arm));

    const controls = make("div", { class: "controls" });
    const set = (key) => (value) => { state[key] = value; state.at = null; draw(); };
    // Whole runs were trained together in groups of different sizes, so that their seconds cannot be compared.
    const across = budgets ? { epochs: "budget", flops: "FLOPs" } : { epochs: "epochs", flops: "FLOPs", seconds: "seconds" };
    if (!group.plain) controls.append(radios("Horizontal axis", across, state.axis, set("axis")));
    if (!group.plain && grows && told) controls.append(radios("Account", ACCOUNTS, state.account, set("account")));
    if (kind === "epochs") controls.append(radios("Range", { whole: "whole", start: "start" }, state.range, set("range")));
    const smooth = make("input", { type: "checkbox" });
    smooth.checked = true;
    smooth.addEventListener("change", () => set("smooth")(smooth.checked));
    if (kind === "epochs") controls.append(make("label", { class: "smooth" }, smooth, "mean of five epochs"));

    for (const arm of group.arms) {
      const sample = make("svg", { viewBox: "0 0 34 10", "aria-hidden": "true" }, stroke(make("path", { d: "M0 5H34" }), arm));
      const button = make("button", { type: "button", "aria-pressed": String(!state.hidden.has(arm.name)), "data-arm": arm.name }, sample, make("span", {}, label(arm)));
      button.addEventListener("click", () => {
        if (!state.hidden.delete(arm.name)) state.hidden.add(arm.name);
        button.setAttribute("aria-pressed", String(!state.hidden.has(arm.name)));
        draw();
      });
      legend.append(button);
    }
    if (controls.children.length) view.append(controls);
    view.append(make("div", { class: "stage" }, svg, tip));
    if (!group.plain) view.append(legend);

    function stroke(path, arm) {
      const width = 1.7 * arm.width;
      path.setAttribute("class", "curve");
      path.setAttribute("style", `--c:var(--${arm.colour})`);
      path.setAttribute("stroke-width", width);
      if (arm.dash.length) path.setAttribute("stroke-dasharray", arm.dash.map((n) => n * width).join(" "));
      return path;
    }

    // The first 40 epochs, or so many that the growth is in the middle; less where the whole curve is short.
    function extent(arms) {
      const ends = arms.map((arm) => curve(arm)[state.axis].at(-1));
      if (state.range === "whole") return Math.max(...ends);
      const starts = arms.map((arm) => {
        const line = curve(arm), last = line.epochs.at(-1);
        const stop = Math.max(Math.min(40, last / 4), Math.min(last, 2.2 * (line.grown ? line.epochs[line.grown] : 0)));
        return line[state.axis][nearest(line.epochs, stop)];
      });
      return Math.max(...starts);
    }

    function heights(arms, end) {
      if (losses) {
        const all = arms.flatMap((arm) => curve(arm).mean);
        return [Math.min(...all) / 1.15, Math.max(...all) * 1.15];
      }
      if (budgets) {
        const all = arms.flatMap((arm) => curve(arm).mean), top = Math.max(...all);
        return [Math.max(Math.floor(Math.min(...all)) - 1, top - (group.below ?? 14)), top + 1];
      }
      // From all but the first climb, and all but the deepest falls: what is left is where lines differ.
      const seen = arms.flatMap((arm) => {
        const line = curve(arm), xs = line[state.axis];
        return line.mean.filter((_, i) => 0.08 * end <= xs[i] && xs[i] <= end);
      }).sort((a, b) => a - b);
      const high = Math.max(...arms.map((arm) => {
        const line = curve(arm);
        return Math.max(...line.mean.map((value, i) => (line[state.axis][i] <= end ? value + line.sd[i] : 0)));
      }));
      const low = Math.min(seen[Math.floor(0.03 * seen.length)] ?? 0, high - 4);
      return [Math.max(0, low - 0.08 * (high - low)), high + 0.5];
    }

    function draw() {
      const arms = visible();
      const width = Math.max(300, svg.parentElement.clientWidth - 8), height = width < 500 ? 300 : 380;
      const margin = group.ends ? Math.max(...arms.map((arm) => short(arm).length)) * 8 + 16 : 14;
      const left = 44, right = width - margin, top = 24, bottom = height - 40;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("height", height);
      svg.setAttribute("aria-label", `${group.title}: ${words.up} by ${words.axis[state.axis]}${grows && told ? `, ${ACCOUNTS[state.account]}` : ""}. Arrow keys read the values.`);
      svg.replaceChildren();
      tip.hidden = true;
      scale = null;
      if (!arms.length) {
        const hidden = state.hidden.size === group.arms.length;
        svg.append(make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, hidden ? "all curves are hidden" : "no results for this account"));
        return;
      }
      let end = extent(arms), start = kind === "epochs" ? 0 : Math.min(...arms.map((arm) => curve(arm)[state.axis][0]));
      const [low, high] = heights(arms, end);
      if (budgets && start === end) [start, end] = [start / 2, 2 * end]; // a single budget stands in the middle
      const times = Math.log2(end / start);
      const x = (value) => left + (budgets ? Math.log2(value / start) / times : (value - start) / (end - start)) * (right - left);
      const value = (share) => (budgets ? start * 2 ** (share * times) : start + share * (end - start));
      const up = losses ? Math.log10 : (value) => value;
      const y = (value) => bottom - ((up(Math.max(value, losses ? low / 2 : value)) - up(low)) / (up(high) - up(low))) * (bottom - top);
      scale = { x, y, value, start, end, left, right, top, bottom, width };

      for (const tick of losses ? decades(low, high) : ticks(low, high, 6)) {
        svg.append(make("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
        svg.append(make("text", { class: "tick", x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, `${tick}`));
      }
      const steps = budgets ? range(0, Math.floor(times + 1e-9) + 1).map((n) => Number((start * 2 ** n).toPrecision(3))) : ticks(start, end, width < 500 ? 4 : 8);
      for (const tick of steps) {
        svg.append(make("line", { class: "grid", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 5 }));
        svg.append(make("text", { class: "tick", x: x(tick), y: bottom + 19, "text-anchor": "middle" }, `${tick}`.replace("-", "−")));
      }
      const below = words.axis[state.axis], fits = 6.6 * below.length < right - 4;
      svg.append(make("text", { class: "axis", x: fits ? right : width / 2, y: height - 5, "text-anchor": fits ? "end" : "middle" }, below));
      svg.append(make("text", { class: "axis", x: 10, y: 13 }, words.up));
      const clip = `clip${++count}`;
      svg.append(make("clipPath", { id: clip }, make("rect", { x: left, y: top, width: right - left, height: bottom - top })));
      const bands = make("g", { "clip-path": `url(#${clip})` }), lines = make("g", { "clip-path": `url(#${clip})` });
      svg.append(bands, lines);
      const shared = new Set();
      for (const arm of arms) before(arm, lines, shared);
      for (const arm of arms.slice().reverse()) line(arm, bands, lines);
      if (group.ends) ends(arms);
      for (const name of legend.children) {
        const arm = group.arms.find((one) => one.name === name.dataset.arm);
        name.lastChild.textContent = label(arm);
        name.hidden = budgets && !curve(arm);
      }
      svg.append(make("g", { class: "marks" }));
      if (state.at !== null) show(state.at);
    }

    // A curve as it is to be drawn: its points on the screen, and the last entry before its growth.
    function shape(arm) {
      const { x, y } = scale, data = curve(arm), xs = data[state.axis];
      const near = state.range === "start" || !state.smooth;
      const mean = near ? data.mean : running(data.mean, data.cuts), sd = near ? data.sd : running(data.sd, data.cuts);
      const points = (from, to, sign) => range(from, to).map((i) => `${x(xs[i]).toFixed(1)} ${y(mean[i] + sign * sd[i]).toFixed(1)}`);
      return { points, cut: Math.max(0, (data.grown ?? 0) - 1), length: xs.length };
    }

    // What lies before a growth is thin and grey, and drawn once for all arms that share it.
    function before(arm, lines, shared) {
      const { points, cut } = shape(arm), d = `M${points(0, cut + 1, 0).join("L")}`;
      if (!cut || shared.has(d)) return;
      shared.add(d);
      const early = stroke(make("path", { d }), arm);
      early.setAttribute("class", "curve before");
      early.setAttribute("stroke-width", 1.3);
      lines.append(early);
    }

    function line(arm, bands, lines) {
      const { points, cut, length } = shape(arm);
      const around = [...points(cut, length, 1), ...points(cut, length, -1).reverse()];
      bands.append(make("path", { class: "band", style: `--c:var(--${arm.colour})`, d: `M${around.join("L")}Z` }));
      const late = stroke(make("path", { d: `M${points(cut, length, 0).join("L")}` }), arm);
      late.dataset.arm = arm.name;
      lines.append(late);
      if (!budgets) return;
      for (const [i, value] of curve(arm).mean.entries()) { // what was measured: of a single budget there is no line
        const cx = scale.x(curve(arm)[state.axis][i]), cy = scale.y(value);
        if (cy <= scale.bottom) svg.append(make("circle", { class: "run", r: 2.6, cx, cy, style: `--c:var(--${arm.colour})`, "data-arm": arm.name }));
      }
    }

    // The name of each line behind its end, moved apart where ends lie close, with a hair to the end.
    function ends(arms) {
      const { x, y, right, top, bottom } = scale, gap = 16;
      const names = arms.map((arm) => ({ arm, x: x(curve(arm)[state.axis].at(-1)), y: Math.min(bottom, Math.max(top, y(curve(arm).mean.at(-1)))) }));
      names.sort((a, b) => a.y - b.y).forEach((name, i) => { name.at = i ? Math.max(name.y, names[i - 1].at + gap) : name.y; });
      const over = Math.max(0, (names.at(-1)?.at ?? 0) - bottom);
      for (let i = names.length - 1, limit = bottom; over && i >= 0; i--, limit = names[i + 1].at - gap) names[i].at = Math.min(names[i].at, limit);
      for (const { arm, x: end, y: height, at } of names) {
        svg.append(make("line", { class: "hair", x1: end + 2, x2: right + 8, y1: height, y2: at }));
        svg.append(make("text", { class: "end", x: right + 11, y: at + 4, style: `--c:var(--${arm.colour})`, "data-arm": arm.name }, short(arm)));
      }
    }

    // 1, 2 and 5 times the powers of ten between two values.
    function decades(low, high) {
      const powers = range(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)) + 1);
      return powers.flatMap((power) => [1, 2, 5].map((n) => Number((n * 10 ** power).toPrecision(6)))).filter((n) => low <= n && n <= high);
    }

    function range(from, to) {
      return Array.from({ length: to - from }, (_, i) => from + i);
    }

    // All budgets at which a line that is shown has runs: between them nothing was measured.
    function measured() {
      return [...new Set(visible().flatMap((arm) => curve(arm)[state.axis]))].sort((a, b) => a - b);
    }

    // The values of all curves at x, in the axis's unit.
    function show(at) {
      if (!scale) return;
      const { x, y, start, end, top, bottom, width } = scale;
      state.at = Math.min(Math.max(at, start), end);
      if (budgets) state.at = measured()[nearest(measured().map(Math.log2), Math.log2(state.at))];
      const marks = svg.querySelector(".marks"), rows = [];
      marks.replaceChildren(make("line", { class: "cross", x1: x(state.at), x2: x(state.at), y1: top, y2: bottom }));
      for (const arm of visible()) {
        const data = curve(arm), xs = data[state.axis], i = nearest(xs, state.at);
        const step = xs.at(-1) / xs.length;
        if (budgets ? xs[i] !== state.at : state.at > xs.at(-1) + step) continue;
        const seen = state.smooth && state.range !== "start" ? running(data.mean, data.cuts)[i] : data.mean[i];
        if (y(seen) <= bottom) marks.append(make("circle", { class: "dot", r: 4, cx: x(xs[i]), cy: y(seen), style: `--c:var(--${arm.colour})` }));
        rows.push({ arm, i, data });
      }
      rows.sort((a, b) => b.data.mean[b.i] - a.data.mean[a.i]);
      const body = make("tbody");
      for (const { arm, i, data } of rows) {
        const name = make("th", { scope: "row" }, make("span", { class: "arm" }, make("i", { class: "swatch", style: `--c:var(--${arm.colour})` }), label(arm)));
        const digits = losses ? 3 : 1, unit = losses ? "" : " %";
        const value = make("td", {}, make("b", {}, data.mean[i].toFixed(digits)), data.n > 1 ? ` ± ${data.sd[i].toFixed(digits)}${unit}` : unit);
        body.append(make("tr", { "data-arm": arm.name, "data-index": i, "data-mean": data.mean[i], "data-sd": data.sd[i] }, name, value));
      }
      const digits = state.axis === "epochs" ? 0 : end < 20 ? 2 : 1;
      const unit = state.axis === "epochs" ? words.at : "", after = { epochs: "", flops: " TFLOP", seconds: " s" }[state.axis];
      tip.replaceChildren(make("b", {}, `${unit}${budgets ? Number(state.at.toPrecision(3)) : state.at.toFixed(digits)}${after}`), make("table", {}, body));
      tip.hidden = false;
      const place = x(state.at) + 4, rightHalf = place > width / 2;
      tip.style.left = rightHalf ? "auto" : `${place + 14}px`;
      tip.style.right = rightHalf ? `${width - place + 22}px` : "auto";
      tip.style.top = "auto";
      tip.style.bottom = "52px";
    }

    function hide() {
      state.at = null;
      tip.hidden = true;
      svg.querySelector(".marks")?.replaceChildren();
    }

    function point(event) {
      if (!scale) return;
      const box = svg.getBoundingClientRect(), { left, right, value, width } = scale;
      const place = ((event.clientX - box.left) / box.width) * width;
      show(value((place - left) / (right - left)));
    }

    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    svg.addEventListener("keydown", (event) => {
      const arm = visible()[0];
      if (!arm || !scale) return;
      const xs = budgets ? measured() : curve(arm)[state.axis], here = state.at === null ? -1 : nearest(xs, state.at);
      const step = event.shiftKey ? 10 : 1;
      const to = { ArrowRight: here + step, ArrowLeft: here - step, Home: 0, End: xs.length - 1 }[event.key];
      if (event.key === "Escape") hide();
      if (to === undefined) return;
      event.preventDefault();
      show(xs[Math.min(Math.max(to, 0), xs.length - 1)]);
    });
    svg.addEventListener("blur", hide);
    let seen = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - seen) > 1) draw();
      seen = entry.contentRect.width;
    }).observe(svg.parentElement);
    draw();
  }

  document.querySelectorAll("figure.plot").forEach(plot);
})();

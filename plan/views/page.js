"use strict";
// What a plan's page can be asked. The functions above `open` make text of the data and know no document.
const W = 1000, LEFT = 130, ROW = 22;

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

function cut(text, most) {
  return text.length <= most ? text : text.slice(0, most - 3) + "...";
}

// A column for each axis: what was told on top, the values on the way, the tensor below all of them.
function chainGraph(tensor, form) {
  const columns = form.chains.length, high = 36, apart = 62, wide = Math.max(260, Math.min(480, 960 / Math.max(1, columns)));
  const rows = Math.max(0, ...form.chains.map((c) => c.steps.length - 1 + (c.told.length ? 1 : 0)));
  const width = Math.max(1, columns) * wide + 20, bottom = rows * apart + 10;
  const box = (x, y, fill, lines) => {
    const words = lines.map((line, i) => `<text x="${x + wide / 2 - 10}" y="${y + 15 + 14 * i}" text-anchor="middle">${escaped(cut(line, wide / 6.2))}</text>`);
    return `<g><title>${escaped(lines.join("\n"))}</title><rect x="${x}" y="${y}" width="${wide - 20}" height="${high}" rx="4" fill="${fill}" stroke="#999"/>${words.join("")}</g>`;
  };
  const out = [];
  form.chains.forEach((chain, i) => {
    const x = 10 + i * wide, middle = x + wide / 2 - 10;
    const boxes = [];
    if (chain.told.length) boxes.push({ fill: "#fff3cd", lines: chain.told.slice(0, 2), through: "" });
    // the last step is the tensor itself, which all columns share
    for (const step of chain.steps.slice(0, -1)) boxes.push({ fill: "#e7f0fa", lines: [step.value, `${chain.axis} on dim ${step.dim}`], through: step.through });
    const end = chain.steps[chain.steps.length - 1];
    let y = bottom - apart * boxes.length;
    boxes.forEach((one, n) => {
      out.push(box(x, y, one.fill, one.lines));
      const next = n + 1 < boxes.length ? boxes[n + 1].through : end.through;
      out.push(`<line x1="${middle}" x2="${middle}" y1="${y + high}" y2="${y + apart}" stroke="#555" marker-end="url(#tip)"/>`);
      out.push(`<text x="${middle + 6}" y="${y + high + 16}" fill="#777">${escaped(cut(next ? `through ${next}` : `${chain.axis} on dim ${end.dim}`, wide / 12))}<title>${escaped(next)}</title></text>`);
      y += apart;
    });
  });
  out.push(`<g><rect x="10" y="${bottom}" width="${width - 20}" height="${high}" rx="4" fill="#dff0d8" stroke="#555"/><text x="${width / 2}" y="${bottom + 22}" text-anchor="middle">${escaped(`${tensor.name} [${tensor.shape.join(", ")}], ${form.form}: ${form.sharding}`)}</text></g>`);
  const tip = '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0,0L8,4L0,8z" fill="#555"/></marker></defs>';
  return `<svg width="${width}" height="${bottom + high + 6}" font-size="11" role="img" aria-label="${escaped(`Why ${tensor.name} is sharded, ${form.form}`)}">${tip}${out.join("")}</svg>`;
}

function tensorText(tensor) {
  const same = tensor.names.length > 1 ? `<p>${tensor.names.length} tensors are alike: ${escaped(tensor.pattern)}</p>` : "";
  const forms = tensor.forms.map((form) => {
    const told = form.annotated ? `<p>annotated ${escaped(form.annotated)}</p>` : "";
    const none = form.chains.length ? "" : "<p>No annotation shards it.</p>";
    return `<h3>${escaped(form.form)}</h3>${told}${none}${chainGraph(tensor, form)}`;
  });
  return same + forms.join("");
}

function collectiveText(rows) {
  const row = (r) => `<tr><td>${escaped(r.value)}</td><td class=n>${r.count}</td><td>${escaped(r.cause)}</td><td>${escaped(r.moved)}</td><td>${r.told.map(escaped).join("<br>")}</td></tr>`;
  return `<div class=scroll><table><thead><tr><th>tensor</th><th class=n>times</th><th>needed by</th><th>from and to</th><th>lines</th></tr></thead><tbody>${rows.map(row).join("")}</tbody></table></div>`;
}

function shownSeconds(s) {
  return s === 0 ? "0" : s < 1e-3 ? `${(s * 1e6).toPrecision(3)} us` : s < 1 ? `${(s * 1e3).toPrecision(4)} ms` : `${s.toPrecision(4)} s`;
}

// At most seven round times between two, in seconds, each with its words in the unit that the later one has.
function roundTicks(from, to) {
  const [unit, size] = to < 1e-3 ? ["us", 1e-6] : to < 1 ? ["ms", 1e-3] : ["s", 1];
  const least = (to - from) / size / 6, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].find((n) => n * power >= least) * power, digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let n = Math.ceil(from / size / step - 1e-9); n * step <= (to / size) * (1 + 1e-9); n++) {
    ticks.push({ seconds: n * step * size, text: `${(n * step).toFixed(digits)} ${unit}` });
  }
  return ticks;
}

// The part of a timeline between two shares of it; neighbours of one colour closer than a pixel are drawn as one.
function timelinePart(line, from, to) {
  const scale = (W - LEFT - 10) / ((to - from) * line.finest), out = [], lanes = line.order;
  const at = (t) => LEFT + (t - from * line.finest) * scale;
  lanes.forEach((lane, row) => {
    let run = null;
    const draw = () => {
      if (run) out.push(`<rect x="${run.x0.toFixed(2)}" y="${row * ROW + 2}" width="${Math.max(run.x1 - run.x0, 0.25).toFixed(2)}" height="${ROW - 4}" fill="${line.colors[run.color]}"><title>${escaped(run.words)}</title></rect>`);
    };
    for (const [start, length, color, word] of line.lanes[lane]) {
      const x0 = Math.max(at(start), LEFT), x1 = Math.min(at(start + length), W - 10);
      if (x1 < LEFT || x0 > W - 10) continue;
      if (run && run.color === color && x0 - run.x1 < 0.3 && run.x1 - run.x0 < 6) {
        run.x1 = x1;
        continue;
      }
      draw();
      run = { x0, x1, color, words: `${line.words[word]} ${shownSeconds((length / line.finest) * line.seconds)}` };
    }
    draw();
    out.push(`<text x="8" y="${row * ROW + 15}">${escaped(lane === "wait" ? "waiting" : lane)}</text>`);
  });
  const ticks = roundTicks(from * line.seconds, to * line.seconds);
  for (const { seconds, text } of ticks) {
    const x = at((seconds / line.seconds) * line.finest);
    out.push(`<text x="${x.toFixed(1)}" y="${lanes.length * ROW + 14}" text-anchor="${x < W - 60 ? "middle" : "end"}" fill="#555">${text}</text>`);
  }
  return out.join("");
}

// The window [from, to] of shares, closer by `factor` around `share`; never beyond the timeline, never below 1/2000 of it.
function zoomed([from, to], factor, share) {
  const wide = Math.min(1, Math.max(1 / 2000, (to - from) / factor));
  const start = Math.min(1 - wide, Math.max(0, share - ((share - from) / (to - from)) * wide));
  return [start, start + wide];
}

function open(page) {
  const data = JSON.parse(page.getElementById("why-data").textContent);
  const choice = page.getElementById("tensor-choice"), graph = page.getElementById("tensor-graph");
  const groupOf = {};
  data.tensors.forEach((tensor, i) => tensor.names.forEach((name) => (groupOf[name] = i)));
  const show = (i) => {
    choice.value = String(i);
    graph.innerHTML = tensorText(data.tensors[i]);
  };
  choice.innerHTML = data.tensors.map((tensor, i) => `<option value="${i}">${escaped(tensor.names.length > 1 ? tensor.pattern : tensor.name)}</option>`).join("");
  choice.addEventListener("change", () => show(Number(choice.value)));
  const chosen = (row, act) => {
    row.tabIndex = 0;
    row.addEventListener("click", act);
    row.addEventListener("keydown", (event) => event.key === "Enter" && act());
  };
  for (const row of page.querySelectorAll("#shardings tbody tr")) chosen(row, () => show(groupOf[row.cells[0].textContent] ?? 0));
  if (data.tensors.length) show(0);
  const found = page.getElementById("collective-why");
  page.querySelectorAll("#collectives tbody tr").forEach((row, i) => chosen(row, () => (found.innerHTML = collectiveText(data.collectives[i]))));
  page.querySelectorAll("svg.timeline").forEach((svg, i) => {
    const whole = svg.innerHTML, line = data.timelines[i];
    const legend = (whole.match(/<g class="legend">[\s\S]*?<\/g>/) || [""])[0];
    let view = [0, 1], held = null;
    const place = (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * W;
      return view[0] + (view[1] - view[0]) * Math.min(1, Math.max(0, (x - LEFT) / (W - LEFT - 10)));
    };
    const draw = (next) => {
      view = next;
      svg.innerHTML = view[1] - view[0] >= 1 ? whole : timelinePart(line, view[0], view[1]) + legend;
    };
    svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      draw(zoomed(view, event.deltaY < 0 ? 1.5 : 1 / 1.5, place(event)));
    });
    svg.addEventListener("mousedown", (event) => (held = place(event)));
    svg.addEventListener("mousemove", (event) => {
      if (held === null) return;
      const wide = view[1] - view[0], start = Math.min(1 - wide, Math.max(0, view[0] + held - place(event)));
      draw([start, start + wide]);
    });
    page.addEventListener("mouseup", () => (held = null));
    svg.addEventListener("dblclick", () => draw([0, 1]));
    svg.addEventListener("keydown", (event) => {
      const wide = view[1] - view[0], middle = (view[0] + view[1]) / 2;
      const moved = (by) => {
        const start = Math.min(1 - wide, Math.max(0, view[0] + by * wide));
        return [start, start + wide];
      };
      const next = { "+": zoomed(view, 1.5, middle), "=": zoomed(view, 1.5, middle), "-": zoomed(view, 1 / 1.5, middle), "0": [0, 1], ArrowLeft: moved(-0.2), ArrowRight: moved(0.2) }[event.key];
      if (!next) return;
      event.preventDefault();
      draw(next);
    });
  });
}

if (typeof document !== "undefined") open(document);

// Axes and what answers to the pointer: the little that the plots need of a plotting library.
const HEIGHT = 330;

function linear(low, high, from, to, apart = 62) {
  if (high === low) { const room = Math.abs(low) * .05 || 1; low -= room; high += room; }
  const at = (value) => from + (value - low) / (high - low) * (to - from);
  const rough = (high - low) / Math.max(2, Math.abs(to - from) / apart);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const ticks = [];
  for (let n = Math.ceil(low / step); n * step <= high * (1 + 1e-12) + 1e-15; n += 1) ticks.push(Number((n * step).toPrecision(12)));
  return { at, ticks };
}

function logarithmic(low, high, from, to) {
  const room = (Math.log10(high) - Math.log10(low)) * .04 || .3;
  const [a, b] = [Math.log10(low) - room, Math.log10(high) + room];
  const at = (value) => from + (Math.log10(value) - a) / (b - a) * (to - from);
  const wanted = Math.max(2, Math.abs(to - from) / 75);
  const within = (steps) => {
    const found = [];
    for (let power = Math.floor(a); power <= b; power += 1) for (const n of steps) if (Math.log10(n) + power >= a && Math.log10(n) + power <= b) found.push(n * 10 ** power);
    return found;
  };
  let ticks = within([1]);
  if (ticks.length < 3) ticks = within([1, 3]);
  if (ticks.length < 3) ticks = within([1, 2, 5]);
  while (ticks.length > wanted + 1) ticks = ticks.filter((_, index) => index % 2 === 0);
  if (ticks.length < 2) return { at, ticks: linear(10 ** a, 10 ** b, from, to).ticks.filter((tick) => tick > 0) };
  return { at, ticks };
}

// A frame in the pixels that its place has; `x` and `y` say low, high, log and how ticks are written.
function frame(place, { x, y, label, height = HEIGHT, left = 54 }) {
  const width = Math.max(260, Math.round(place.clientWidth));
  const box = { left, right: width - 12, top: 14, bottom: height - 42 };
  const drawn = svg('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label, tabindex: 0 });
  const xs = (x.log ? logarithmic : linear)(x.low, x.high, box.left, box.right);
  const ys = y && linear(y.low, y.high, box.bottom, box.top, 44);
  for (const tick of xs.ticks) {
    const at = xs.at(tick);
    drawn.append(svg('line', { class: 'grid', x1: at, x2: at, y1: box.top, y2: box.bottom }));
    const text = svg('text', { x: at, y: box.bottom + 17, 'text-anchor': at > box.right - 14 ? 'end' : 'middle' });
    text.textContent = x.show(tick);
    drawn.append(text);
  }
  for (const tick of ys ? ys.ticks : []) {
    drawn.append(svg('line', { class: 'grid', x1: box.left, x2: box.right, y1: ys.at(tick), y2: ys.at(tick) }));
    const text = svg('text', { x: box.left - 7, y: ys.at(tick) + 4, 'text-anchor': 'end' });
    text.textContent = figure(tick);
    drawn.append(text);
  }
  drawn.append(svg('line', { class: 'axis', x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  const under = svg('text', { x: (box.left + box.right) / 2, y: height - 6, 'text-anchor': 'middle' });
  under.textContent = x.label;
  drawn.append(under);
  place.append(drawn);
  return { drawn, box, at: (a, b) => [xs.at(a), ys ? ys.at(b) : b], width };
}

// Room above and below, and shares kept between 0 and 1.
function span(values, share) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  const room = (high - low) * .06 || .02;
  return { low: share ? Math.max(low - room, -.01) : low - room, high: share ? Math.min(high + room, 1.01) : high + room };
}

const isShare = (rows) => rows.every((row) => row.of.greater && row.seeds.every((run) => run.value >= 0 && run.value <= 1));

// The nearest mark tells of itself to a pointer, a finger or the arrow keys.
function answers(drawn, spots) {
  const tip = $('#tip');
  const ring = svg('circle', { class: 'ring', r: 10, visibility: 'hidden' });
  drawn.append(ring);
  let current = -1;
  const order = spots.map((_, index) => index).sort((a, b) => spots[a].x - spots[b].x || spots[a].y - spots[b].y);
  function show(index) {
    current = index;
    const spot = spots[index];
    ring.setAttribute('cx', spot.x);
    ring.setAttribute('cy', spot.y);
    ring.setAttribute('visibility', 'visible');
    tip.replaceChildren(el('b', {}, spot.title), ...spot.lines.map((text) => el('div', {}, text)));
    tip.hidden = false;
    const area = drawn.getBoundingClientRect();
    const scale = area.width / drawn.viewBox.baseVal.width;
    const [x, y] = [area.left + spot.x * scale, area.top + spot.y * scale];
    tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${y - tip.offsetHeight - 14 < 56 ? y + 14 : y - tip.offsetHeight - 14}px`;
  }
  function hide() {
    current = -1;
    ring.setAttribute('visibility', 'hidden');
    tip.hidden = true;
  }
  function point(event) {
    const area = drawn.getBoundingClientRect();
    const scale = drawn.viewBox.baseVal.width / area.width;
    const [x, y] = [(event.clientX - area.left) * scale, (event.clientY - area.top) * scale];
    let best = -1, near = 30 ** 2;
    spots.forEach((spot, index) => {
      const distance = (spot.x - x) ** 2 + (spot.y - y) ** 2;
      if (distance < near) { near = distance; best = index; }
    });
    if (best < 0) hide();
    else if (best !== current) show(best);
  }
  drawn.addEventListener('pointermove', point);
  drawn.addEventListener('pointerdown', point);
  drawn.addEventListener('pointerleave', hide);
  drawn.addEventListener('blur', hide);
  drawn.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === 'Escape') hide();
    if (!step || !spots.length) return;
    event.preventDefault();
    const place = order.indexOf(current);
    show(order[place < 0 ? 0 : (place + step + order.length) % order.length]);
  });
}

function panel(place) {
  const made = el('figure', { class: 'panel' });
  place.append(made);
  return made;
}

function captioned(place, rows, kind) {
  const inside = el('div', {});
  place.append(el('figcaption', {}, rows[0].of.label, el('span', { class: 'kind' }, kind)), inside);
  return inside;
}

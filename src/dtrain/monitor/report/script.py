"""What the page does by itself: it tells values where one points or moves by keys, and hides runs.

The page is whole without it. It asks for nothing and puts text in as text only.
"""

from __future__ import annotations

SCRIPT = """
(() => {
'use strict';
const tip = document.getElementById('tip');
const short = v => {
  if (v === null) return 'no number';
  const size = Math.abs(v);
  if (v !== 0 && (size >= 1e7 || size < 1e-3)) return v.toExponential(2);
  return size >= 1000 ? Math.round(v).toLocaleString('en') : String(+v.toPrecision(4));
};
const tell = {
  number: short,
  percent: v => v === null ? short(v) : short(v * 100) + ' %',
  seconds: v => {
    if (v === null) return short(v);
    if (v >= 3600) return Math.floor(v / 3600) + ' h ' + Math.round(v % 3600 / 60) + ' min';
    if (v >= 60) return Math.floor(v / 60) + ' min ' + Math.round(v % 60) + ' s';
    if (v >= 1 || v === 0) return +v.toPrecision(3) + ' s';
    return v >= 1e-3 ? +(v * 1e3).toPrecision(3) + ' ms' : +(v * 1e6).toPrecision(3) + ' µs';
  },
};
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; xs[mid] < x ? low = mid : high = mid; }
  return x - xs[low] <= xs[high] - x ? low : high;
};
const hide = () => {
  tip.hidden = true;
  document.querySelectorAll('.cross').forEach(c => { c.style.visibility = 'hidden'; });
};
const make = (name, text) => {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
};
document.querySelectorAll('.plot').forEach(plot => {
  const holder = plot.querySelector('script');
  if (!holder) return;
  let data = null, at = 0;
  const svg = plot.querySelector('svg'), cross = svg.querySelector('.cross');
  const load = () => data || (data = JSON.parse(holder.textContent));
  const seen = () => load().lines.filter(l => l.run === null || !hidden.has(l.run));
  const show = (x, left, top) => {
    const [from, to] = load().box, [first, last] = data.ends;
    const lines = seen();
    if (!lines.length) return hide();
    const close = lines.map(l => l.x[nearest(l.x, x)])
      .reduce((a, b) => Math.abs(a - x) <= Math.abs(b - x) ? a : b);
    const place = from + (close - first) / (last - first) * (to - from);
    cross.setAttribute('x1', place); cross.setAttribute('x2', place);
    cross.style.visibility = 'visible';
    tip.replaceChildren(make('b', data.axis + ' ' + tell[data.units[0]](close)));
    const reach = (last - first) / 40;
    lines.map(l => [l, nearest(l.x, close)]).filter(([l, i]) => Math.abs(l.x[i] - close) <= reach)
      .sort((a, b) => (b[0].y[b[1]] ?? -Infinity) - (a[0].y[a[1]] ?? -Infinity)).slice(0, 20)
      .forEach(([l, i]) => {
        const row = make('div', '');
        row.className = 's' + l.style;
        row.append(make('i', ''), make('span', l.name), make('em', tell[data.units[1]](l.y[i])));
        tip.append(row);
      });
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const beside = left + 16 + box.width > innerWidth ? left - 16 - box.width : left + 16;
    tip.style.left = Math.max(8, Math.min(beside, innerWidth - box.width - 8)) + 'px';
    tip.style.top = Math.max(8, Math.min(top + 12, innerHeight - box.height - 8)) + 'px';
  };
  svg.addEventListener('pointermove', event => {
    const area = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
    const [from, to] = load().box, [first, last] = data.ends;
    const share = ((event.clientX - area.left) / area.width * width - from) / (to - from);
    show(first + Math.min(Math.max(share, 0), 1) * (last - first), event.clientX, event.clientY);
  });
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', event => {
    const lines = seen();
    if (event.key === 'Escape') return hide();
    if (!['ArrowLeft', 'ArrowRight', 'Home', 'End'].includes(event.key) || !lines.length) return;
    event.preventDefault();
    const xs = lines.reduce((a, b) => b.x.length > a.x.length ? b : a).x;
    const jump = Math.max(1, Math.round(xs.length / 60));
    const next = tip.hidden ? at : at + jump;
    at = { ArrowLeft: at - jump, ArrowRight: next, Home: 0, End: xs.length - 1 }[event.key];
    at = Math.max(0, Math.min(at, xs.length - 1));
    const area = svg.getBoundingClientRect(), [from, to] = load().box, [first, last] = data.ends;
    const place = from + (xs[at] - first) / (last - first) * (to - from);
    show(xs[at], area.left + place / svg.viewBox.baseVal.width * area.width, area.top + 24);
  });
});
const hidden = new Set();
document.querySelectorAll('[data-toggle]').forEach(button => button.addEventListener('click', () => {
  const run = Number(button.dataset.toggle), off = !hidden.has(run);
  off ? hidden.add(run) : hidden.delete(run);
  button.setAttribute('aria-pressed', String(!off));
  document.querySelectorAll('[data-run="' + run + '"]').forEach(part => part.classList.toggle('off', off));
}));
})();
"""
"""The page's one script."""

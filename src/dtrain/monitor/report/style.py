"""How the page looks: light and dark, wide and narrow, on screen and on paper.

The colours of curves and of parts were chosen so that any two stay apart for people with protanopia,
deuteranopia and tritanopia, and have a contrast of at least 3 to the ground; dashes, marks and names tell the
same without colour.
"""

from __future__ import annotations

from dtrain.time_parts import PARTS

_LIGHT = """
--ground:#f4f5f7;--card:#fff;--ink:#191c22;--weak:#565d6b;--rule:#e2e5ea;--grid:#e6e8ed;--accent:#1a5fa3;
--good:#1a6b3c;--good-bg:#e2f3e8;--bad:#a8222c;--bad-bg:#fdeaea;--warn:#7a4b00;--warn-bg:#fdf2dc;
--info:#1a5fa3;--info-bg:#e5f0fb;--differs:#fff6dd;--shade:#0003;
--s0:#1f6fb5;--s1:#d1600a;--s2:#611ba7;--s3:#4e8259;--s4:#664610;--s5:#4693f1;--s6:#00566e;--s7:#b9418e;
--compute:#1f6fb5;--input:#d1600a;--communication:#611ba7;--checkpoint:#00566e;--callbacks:#b9418e;
--validation:#4e8259;--start:#664610;--other:#8a909c;
"""
_DARK = """
--ground:#0f1115;--card:#181b21;--ink:#e9ebef;--weak:#a5acb9;--rule:#2c313a;--grid:#2a2f38;--accent:#7cb8f5;
--good:#7fd6a0;--good-bg:#15301f;--bad:#ff9a9a;--bad-bg:#3a1a1d;--warn:#f3c572;--warn-bg:#35280f;
--info:#8fc4fa;--info-bg:#152a40;--differs:#322a14;--shade:#000a;
--s0:#5aa5f2;--s1:#f0883e;--s2:#a878ee;--s3:#80b38a;--s4:#f7d19c;--s5:#a8ceff;--s6:#458aa4;--s7:#e58bc0;
--compute:#5aa5f2;--input:#f0883e;--communication:#a878ee;--checkpoint:#458aa4;--callbacks:#e58bc0;
--validation:#80b38a;--start:#f7d19c;--other:#868d9a;
"""

_FRAME = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Liberation Sans",sans-serif;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.page{max-width:1320px;margin:0 auto;padding:28px 24px 48px}
h1{font-size:26px;line-height:1.2;margin:0;letter-spacing:-.01em}
h2{font-size:18px;margin:0 0 14px;line-height:1.3}
h3{font-size:14px;margin:18px 0 8px;font-weight:600}
a{color:var(--accent)}
.skip{position:absolute;left:-999px}
.skip:focus{left:8px;top:8px;background:var(--card);padding:6px 10px;z-index:3}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:4px}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.quiet,.weak,.note{color:var(--weak)}
.quiet{font-size:13px;margin:8px 0}
.plain{list-style:none;margin:8px 0;padding:0}
.heading{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center}
.facts{display:flex;flex-wrap:wrap;gap:10px 28px;margin:16px 0 10px}
.facts dt{font-size:12px;color:var(--weak)}
.facts dd{margin:0}
section,.problems{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:18px 20px 20px;margin:16px 0 0;scroll-margin-top:8px}
.problems{border-left:4px solid var(--warn);background:var(--warn-bg)}
.problems h2{font-size:15px;margin:0 0 6px}
.problems ul{margin:0;padding-left:20px}
nav{margin:18px 0 0}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:0;padding:0;font-size:14px}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
details{margin-top:12px}
summary{cursor:pointer;color:var(--accent);font-size:14px;width:fit-content}
.badge{display:inline-block;padding:1px 9px;border-radius:999px;font-size:12.5px;line-height:1.6;
white-space:nowrap;background:var(--rule);color:var(--ink);font-weight:600}
.heading .badge{white-space:normal}
.badge.finished{background:var(--good-bg);color:var(--good)}
.badge.running{background:var(--info-bg);color:var(--info)}
.badge.failed{background:var(--bad-bg);color:var(--bad)}
.badge.left,.badge.slow,.badge.differs{background:var(--warn-bg);color:var(--warn)}
"""

_PARTS = """
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:14px 22px;margin:0}
.tile dt{font-size:13px;color:var(--weak)}
.tile dd{margin:0;font-size:25px;line-height:1.25;font-weight:600;letter-spacing:-.01em}
.tile dd.note{font-size:12.5px;font-weight:400;letter-spacing:0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:24px 22px}
.plot.whole{display:none}
.chart{margin:0;min-width:0;max-width:540px;display:flex;flex-direction:column;gap:6px}
.charts .plot{margin-top:auto}
.charts.of1{grid-template-columns:1fr}
.charts.of2{grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr))}
.charts.of1 .chart,.charts.of2 .chart{max-width:none}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 10px;min-height:24px}
figcaption h3{margin:0}
.by{font-size:12px;color:var(--weak)}
.by[hidden]{display:none}
.adjust{display:flex;flex-wrap:wrap;gap:4px 12px;align-items:center;margin-left:auto;
font-size:12.5px;color:var(--weak)}
.adjust button{font:inherit;color:var(--ink);background:var(--card);
border:1px solid var(--rule);border-radius:6px;padding:1px 8px;cursor:pointer}
.adjust button[aria-pressed=true]{background:var(--info-bg);border-color:var(--info);color:var(--info)}
.adjust label{display:inline-flex;gap:6px;align-items:center}
.adjust input{width:76px;margin:0;accent-color:var(--accent)}
.line.raw{opacity:.3}
figcaption .legend{flex-basis:100%}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:3px 16px;margin:2px 0 4px;padding:0;font-size:13px}
.legend li,.key{display:inline-flex;align-items:center;gap:6px}
.legend.runs{margin:14px 0 0;gap:8px}
.legend button{display:inline-flex;align-items:center;gap:7px;font:inherit;color:inherit;
background:var(--card);border:1px solid var(--rule);border-radius:999px;
padding:4px 12px 4px 9px;cursor:pointer;max-width:100%;
text-align:left}
.legend button[aria-pressed=false]{opacity:.5;text-decoration:line-through}
.swatch{width:30px;height:12px;flex:none}
.swatch.box{width:12px}
.plot{position:relative}
.plot svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
.tick,.axis{font-size:11px;fill:var(--weak)}
.grid{stroke:var(--grid);stroke-width:1}
.base{stroke:var(--weak);stroke-width:1;opacity:.55}
.line{fill:none;stroke:currentColor;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
.line[stroke-dasharray]{stroke-linecap:butt}
.dot{fill:currentColor;stroke:var(--card);stroke-width:.8}
.cross{stroke:var(--weak);stroke-width:1;visibility:hidden}
.mark .at{stroke:var(--bad);stroke-width:1;stroke-dasharray:3 2}
.mark .head{fill:var(--bad)}
.mark.attempt .at{stroke:var(--weak);stroke-dasharray:1 3}
.stack rect:hover,.flat rect:hover{opacity:.75}
.flat{display:block;width:100%;min-width:150px;height:14px;margin-top:3px;border-radius:3px}
.beside{display:flex;flex-wrap:wrap;gap:18px 36px;align-items:flex-start}
.beside .chart{flex:1 1 340px;max-width:470px}
.beside .scroll{flex:1 1 340px}
.off{display:none}
tr.off{display:table-row;opacity:.4}
#tip{position:fixed;z-index:2;pointer-events:none;background:var(--card);color:var(--ink);
border:1px solid var(--rule);border-radius:8px;padding:7px 10px;font-size:12.5px;line-height:1.45;
box-shadow:0 4px 18px rgb(0 0 0/.18);max-width:min(320px,calc(100vw - 16px))}
#tip[hidden]{display:none}
#tip b{display:block;color:var(--weak);font-weight:600}
#tip div{display:flex;gap:8px;align-items:center}
#tip i{width:9px;height:9px;border-radius:50%;background:currentColor;flex:none}
#tip em{margin-left:auto;font-style:normal;font-weight:600;padding-left:12px;color:var(--ink)}
#tip span{color:var(--ink)}
"""

_TABLES = """
.scroll{overflow-x:auto;max-width:100%;position:relative;background:
linear-gradient(to right,var(--card) 40%,transparent) left/36px 100%,
linear-gradient(to left,var(--card) 40%,transparent) right/36px 100%,
linear-gradient(to right,var(--shade),transparent) left/12px 100%,
linear-gradient(to left,var(--shade),transparent) right/12px 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
.scroll.tall{overflow-y:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;overflow-wrap:normal}
th,td{padding:6px 14px 6px 0;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top}
thead th{font-size:12.5px;font-weight:600;color:var(--weak);line-height:1.3;vertical-align:bottom}
thead th:not(.number){white-space:nowrap}
.tall thead th{position:sticky;top:0;background:var(--card);z-index:1}
tbody th{font-weight:500}
tbody tr:last-child>*{border-bottom:0}
tbody tr:hover{background:color-mix(in srgb,var(--ink) 4%,transparent)}
.number{text-align:right}
td:not(.long):not(.value),tbody th{white-space:nowrap}
td.long{min-width:240px}
td.value{min-width:170px;max-width:420px;overflow-wrap:anywhere}
.wide{min-width:180px;width:30%}
tr.sum>*{font-weight:600}
tr.slow,tr.bad{background:var(--warn-bg)}
tr.slow .badge{background:var(--card)}
tr.differs{background:var(--differs)}
tr.outcome{color:var(--weak)}
code{font:13px ui-monospace,"DejaVu Sans Mono","Liberation Mono",Menlo,monospace}
tbody th code{white-space:nowrap;overflow-wrap:normal}
.beside td:last-child{white-space:normal;min-width:150px}
.scroll.tall{max-height:min(620px,80vh)}
"""

_NARROW = """
@media(min-width:1000px){.of1 .plot{display:none}.of1 .plot.whole{display:block}}
@media(max-width:640px){
.page{padding:16px 10px 32px}
section,.problems{padding:14px 12px 16px;margin-top:12px}
h1{font-size:22px}
.tiles{grid-template-columns:repeat(2,1fr);gap:12px 14px}
.tile dd{font-size:21px}
tbody th{white-space:normal;min-width:118px;max-width:190px;overflow-wrap:anywhere}
}
@media print{
body{background:#fff}
nav,.legend.runs,.skip{display:none}
section{border:0;padding:0;break-inside:avoid-page}
.chart,tr{break-inside:avoid}
.scroll,.scroll.tall{overflow:visible;max-height:none}
}
"""

_STYLES = "".join(f".s{place}{{color:var(--s{place})}}" for place in range(8))
_FILLS = "".join(f".p-{part}{{fill:var(--{part})}}" for part in PARTS)

STYLE = (
    f":root{{{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    f"{_FRAME}{_PARTS}{_TABLES}{_STYLES}{_FILLS}{_NARROW}"
).replace("\n", "")
"""The page's one style sheet."""

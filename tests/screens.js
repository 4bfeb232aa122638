"use strict";
// Looks at each of PAGES in the frame, and posts a line for everything that is wrong.
const frame = document.getElementById("frame"), WIDTHS = [1280, 390], SCHEMES = ["default", "slate"];

const loaded = (address) => new Promise((resolve) => { frame.onload = resolve; frame.src = address; });

function sideways(inner, width) {  // what sticks out, if the page scrolls sideways
  if (inner.innerWidth !== width || frame.offsetWidth !== width) return [`is ${inner.innerWidth} pixels wide, not ${width}`];
  const root = inner.document.scrollingElement;
  if (root.scrollWidth <= width) return [];
  const out = [...inner.document.body.querySelectorAll("*")].filter((one) => one.getBoundingClientRect().right > width + 1);
  const widest = out.map((one) => one.tagName.toLowerCase() + "." + one.className).slice(0, 3).join(", ");
  return [`${root.scrollWidth} pixels wide at ${width}: ${widest}`];
}

function headings(inner) {
  const shown = [...inner.document.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter((one) => one.offsetParent !== null);
  const levels = shown.map((one) => Number(one.tagName[1])), told = [];
  if (levels.filter((level) => level === 1).length !== 1) told.push("not one heading of the first level: " + levels);
  levels.forEach((level, k) => {
    if (k && level > levels[k - 1] + 1) told.push(`heading ${shown[k].textContent.trim()} leaves out a level`);
  });
  return told;
}

function words(inner) {  // of pictures, fields, links and buttons
  const told = [], named = (one) => (one.getAttribute("aria-label") || one.title || one.textContent || "").trim();
  for (const one of inner.document.querySelectorAll("img")) {
    if (!(one.getAttribute("alt") || "").trim()) told.push("a picture without words: " + one.getAttribute("src"));
  }
  for (const one of inner.document.querySelectorAll("a[href], button")) {
    if (one.offsetParent !== null && !named(one) && !one.querySelector("img[alt]")) told.push("without words: " + one.outerHTML.slice(0, 80));
  }
  if (!inner.document.documentElement.lang) told.push("the page names no language");
  return told;
}

function rgba(text) {
  const parts = text.match(/[\d.]+/g).map(Number);
  return parts.length < 4 ? [...parts, 1] : parts;
}

function over(front, back) { return [0, 1, 2].map((k) => front[k] * front[3] + back[k] * (1 - front[3])); }

function ground(inner, one, known) {  // the colour behind the text of an element; null: a picture is behind it
  if (one === null) return [255, 255, 255];
  if (known.has(one)) return known.get(one);
  const style = inner.getComputedStyle(one), own = rgba(style.backgroundColor);
  let found = null;
  if (style.backgroundImage === "none") {
    const behind = own[3] === 1 ? own : ground(inner, one.parentElement, known);
    found = behind && over(own, behind);
  }
  known.set(one, found);
  return found;
}

function luminance(colour) {
  const [r, g, b] = colour.map((part) => part / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function faint(inner, scheme) {
  const told = new Map(), known = new Map(), seen = inner.document.createTreeWalker(inner.document.body, NodeFilter.SHOW_TEXT);
  while (seen.nextNode()) {
    const text = seen.currentNode.textContent.trim(), one = seen.currentNode.parentElement;
    if (!text || one.offsetParent === null || one.closest("svg, script, style, noscript, .headerlink, [aria-hidden=true]")) continue;
    const style = inner.getComputedStyle(one), behind = ground(inner, one, known);
    if (behind === null || style.visibility === "hidden" || Number(style.opacity) === 0) continue;
    const front = luminance(over(rgba(style.color), behind)), back = luminance(behind);
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05), size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const kind = `${one.tagName.toLowerCase()}.${one.className} ${style.color} on ${behind.map(Math.round)} (${scheme})`;
    if (ratio < (isLarge ? 3 : 4.5) - 0.005 && !told.has(kind)) told.set(kind, `${ratio.toFixed(2)} to 1: ${kind}: ${text.slice(0, 30)}`);
  }
  return [...told.values()];
}

async function look(page) {
  const told = [];
  frame.style.width = WIDTHS[0] + "px";
  frame.style.height = "900px";
  await loaded("/" + page);
  const inner = frame.contentWindow;
  for (const width of WIDTHS) {
    frame.style.width = width + "px";
    told.push(...sideways(inner, width));
  }
  told.push(...headings(inner), ...words(inner));
  frame.style.width = WIDTHS[0] + "px";
  const body = inner.document.body, schemes = body.hasAttribute("data-md-color-scheme") ? SCHEMES : ["its own"];
  const still = inner.document.createElement("style");
  still.textContent = "* { transition: none !important; animation: none !important; }";
  inner.document.head.append(still);
  for (const scheme of schemes) {
    if (schemes.length > 1) body.setAttribute("data-md-color-scheme", scheme);
    told.push(...faint(inner, scheme));
  }
  return told.map((line) => page + ": " + line);
}

(async () => {
  const all = [];
  for (const page of PAGES) all.push(...await look(page).catch((error) => [page + ": " + error]));
  await fetch("/", { method: "POST", body: JSON.stringify(all) });
})();

"use strict";
// The values under the pointer, below each figure.
for (const figure of document.querySelectorAll("figure[data-points]")) {
  const curves = JSON.parse(figure.dataset.points), read = figure.querySelector(".read");
  const drawing = figure.querySelector(".drawing");
  const first = Math.min(...curves.map(([, steps]) => steps[0]));
  const last = Math.max(...curves.map(([, steps]) => steps[steps.length - 1]));
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (steps[mid] < step) low = mid + 1; else high = mid; }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const step = first + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (last - first);
    const told = curves.map(([label, steps, values]) => {
      const i = nearest(steps, step);
      return (curves.length > 1 ? label + " " : "") + Number(values[i].toPrecision(4)) + " (step " + steps[i] + ")";
    });
    read.textContent = told.join(", ");
  });
  drawing.addEventListener("pointerleave", () => { read.textContent = ""; });
}
// Completions that hold what is searched for.
const search = document.getElementById("search");
if (search) {
  const all = [...document.querySelectorAll(".completion")], count = document.getElementById("count");
  const texts = all.map((one) => one.textContent.toLowerCase());
  const look = () => {
    const wanted = search.value.trim().toLowerCase();
    let found = 0;
    all.forEach((one, i) => {
      one.hidden = wanted !== "" && !texts[i].includes(wanted);
      found += one.hidden ? 0 : 1;
      if (wanted !== "" && !one.hidden) one.closest(".step").open = true;
    });
    for (const step of document.querySelectorAll(".step")) {
      step.hidden = wanted !== "" && !step.querySelector(".completion:not([hidden])");
    }
    count.textContent = wanted === "" ? "" : found + " of " + all.length + " completions";
  };
  search.addEventListener("input", look);
}
// A run that goes on: the page is written again, and read again if that is wished.
const follow = document.getElementById("follow");
if (follow) {
  const seconds = 20;
  follow.hidden = false;
  const set = (on) => { follow.setAttribute("aria-pressed", String(on)); };
  set(location.hash === "#follow");
  if (location.hash === "#follow") setTimeout(() => location.reload(), 1000 * seconds);
  follow.addEventListener("click", () => {
    location.hash = location.hash === "#follow" ? "" : "#follow";
    location.reload();
  });
}

// The slider of the prior precision: every element with data-sweep shows what its name has at the slider's place.
"use strict";
(() => {
  const source = document.getElementById("sweep");
  if (!source) return;
  const { chosen, values } = JSON.parse(source.textContent);
  const box = document.getElementById("slider"), input = box.querySelector("input"), reset = box.querySelector("button");
  const moving = [...document.querySelectorAll("[data-sweep]")];
  const show = (step) => {
    for (const element of moving) {
      const value = values[element.dataset.sweep][step];
      if (element instanceof SVGPathElement) element.setAttribute("d", value);
      else element.textContent = value;
    }
    input.setAttribute("aria-valuetext", values.precision[step]);
    reset.disabled = Number(step) === chosen;
  };
  input.addEventListener("input", () => show(input.value));
  reset.addEventListener("click", () => { input.value = chosen; show(chosen); });
  addEventListener("beforeprint", () => show(chosen));
  addEventListener("afterprint", () => show(input.value));
  input.value = chosen;
  show(chosen);
  input.hidden = reset.hidden = false;
})();

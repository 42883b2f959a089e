"use strict";
// Goes to the next and the previous page with j and k, rates with r, and copies texts. Pages work without it.

document.addEventListener("keydown", (event) => {
  const isWriting = event.target.closest("input, select, textarea");
  if (isWriting || event.ctrlKey || event.metaKey || event.altKey) return;
  document.querySelector({ j: "a[rel=next]", k: "a[rel=prev]", r: "a[data-rate]" }[event.key])?.click();
});

// data-copy names an element of the page, or the address of a text.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const from = button.dataset.copy;
  const text = from.startsWith("#") ? document.querySelector(from).textContent : await (await fetch(from)).text();
  await navigator.clipboard.writeText(text);
  button.textContent = "Copied";
});

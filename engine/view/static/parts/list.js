// A list of any length: only what is in view is in the document.

import { h } from "view/parts/dom";

/** height: of a row, in pixels. row: (index) => element of class "item". view: pixels of the list. */
export function virtualList({ count, height, row, view = 620, id = null }) {
  const sizer = h("div", { class: "sizer", style: { height: `${count * height}px` } });
  const scroll = h(
    "div",
    { class: "scroll", id, tabindex: "0", role: "list", style: { maxHeight: `${view}px` } },
    sizer,
  );
  const shown = new Map();
  let asked = false;
  const show = () => {
    asked = false;
    const first = Math.max(0, Math.floor(scroll.scrollTop / height) - 8);
    const last = Math.min(count, Math.ceil((scroll.scrollTop + view) / height) + 8);
    for (const [index, element] of shown) {
      if (index < first || index >= last) {
        element.remove();
        shown.delete(index);
      }
    }
    for (let index = first; index < last; index++) {
      if (shown.has(index)) continue;
      const element = row(index);
      element.style.top = `${index * height}px`;
      element.style.height = `${height}px`;
      element.setAttribute("role", "listitem");
      shown.set(index, element);
      sizer.append(element);
    }
  };
  scroll.addEventListener(
    "scroll",
    () => {
      if (!asked) requestAnimationFrame(show);
      asked = true;
    },
    { passive: true },
  );
  show();
  return scroll;
}

/* Says of a table that is wider than the window that it can be scrolled. */
function say() {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const before = table.previousElementSibling;
    const there = before && before.classList.contains("scrolls-sideways");
    const scrolls = table.scrollWidth > table.clientWidth + 1;
    if (scrolls && !there) {
      const words = document.createElement("p");
      words.className = "scrolls-sideways";
      words.textContent = "This table scrolls sideways \u2192";
      table.before(words);
    } else if (!scrolls && there) {
      before.remove();
    }
  }
}
addEventListener("load", say);
addEventListener("resize", say);

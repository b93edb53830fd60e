// Sorts numbers by value with missing ones last, texts by the alphabet; a second click turns the order round.
document.querySelectorAll("table.sortable").forEach(table => table.querySelectorAll("th").forEach((head, column) =>
  head.addEventListener("click", () => {
    const turned = { ascending: "descending", descending: "ascending" };
    const order = turned[head.getAttribute("aria-sort")] || head.dataset.first;
    table.querySelectorAll("th").forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const numbers = [...table.tBodies[0].rows].some(row => row.cells[column].dataset.by !== "");
    const key = row => row.cells[column].dataset.by;
    [...table.tBodies[0].rows].sort((a, b) => {
      if (!numbers) return sign * a.cells[column].textContent.localeCompare(b.cells[column].textContent);
      if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
      return sign * (key(a) - key(b));
    }).forEach(row => table.tBodies[0].append(row));
  })));
// A link to a folded section opens it.
const open = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
addEventListener("hashchange", open);
open();

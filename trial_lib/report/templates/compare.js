const summaryOf = (page) => JSON.parse(page.getElementById("summary").textContent);
document.querySelector(".compare").hidden = false;
document.getElementById("other").addEventListener("change", async (event) => {
  const [table, word] = [document.getElementById("compared"), document.getElementById("not-compared")];
  const rows = table.querySelector("tbody");
  rows.replaceChildren();
  table.hidden = true;
  word.textContent = "";
  const [file] = event.target.files;
  if (!file) return;
  let both;
  try {
    // Parsed without being run: a report is a file of somebody else's.
    const other = new DOMParser().parseFromString(await file.text(), "text/html");
    both = [summaryOf(document), summaryOf(other)];
    both = both.map((one) => [{ study: one.study, ...one.answer }, one.circumstances]);
  } catch {
    word.textContent = `${file.name} is no report of a study, or of a version before this comparison.`;
    return;
  }
  const [answers, circumstances] = [0, 1].map((part) => both.map((one) => one[part]));
  const row = (name, cells) => {
    const line = rows.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    line.append(head);
    cells.forEach((text, place) => {
      const cell = line.insertCell();
      cell.className = "any";
      cell.dataset.label = ["this study", "the other"][place];
      cell.textContent = text ?? "-";
    });
  };
  const names = (parts) => [...new Set(parts.flatMap(Object.keys))];
  names(answers).forEach((name) => row(name, answers.map((one) => one[name])));
  // What is alike says nothing.
  names(circumstances)
    .filter((name) => circumstances[0][name] !== circumstances[1][name])
    .forEach((name) => row(name, circumstances.map((one) => one[name])));
  table.hidden = false;
});

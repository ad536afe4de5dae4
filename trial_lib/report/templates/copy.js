document.querySelectorAll("button[data-copies]").forEach((button) => button.addEventListener("click", async () => {
  const text = document.getElementById(button.dataset.copies);
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(text);
    button.textContent = "Selected";
  }
}));

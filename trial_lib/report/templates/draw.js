(async () => {
  const drawings = JSON.parse(document.getElementById("drawings").textContent);
  const said = (text) => document.querySelectorAll(".plot").forEach((plot) => { plot.textContent = text; });
  document.querySelectorAll("button[data-copies]").forEach((button) => button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copies).textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(document.getElementById(button.dataset.copies));
      button.textContent = "Selected";
    }
  }));
  // What is folded away is not printed, but for what is short.
  const folded = [...document.querySelectorAll("details[data-prints]:not([open])")];
  addEventListener("beforeprint", () => folded.forEach((details) => { details.open = true; }));
  addEventListener("afterprint", () => folded.forEach((details) => { details.open = false; }));
  if (!Object.keys(drawings).length) return;
  if (!("DecompressionStream" in window)) {
    said("This browser is too old to draw the figures (it needs DecompressionStream). Their numbers are below.");
    return;
  }
  const packed = atob(document.getElementById("plotly").textContent.trim());
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const code = document.createElement("script");
  code.textContent = await new Response(stream).text();
  document.head.append(code);

  // A finger on a figure scrolls the page.
  const byFinger = matchMedia("(pointer: coarse)").matches;
  // Of the paper between its margins: A4 is the narrower one, US letter the shorter one. Two figures fit a page.
  const paper = { width: 680, height: 380 };
  const draw = (forPrint = false) => {
    document.documentElement.classList.toggle("printed", forPrint);
    const style = getComputedStyle(document.documentElement);
    const [ink, line, card, bad] = ["--ink", "--line", "--card", "--bad"].map((name) => style.getPropertyValue(name).trim());
    const narrow = !forPrint && innerWidth < 700;
    for (const [key, drawing] of Object.entries(drawings)) {
      const layout = structuredClone(drawing.layout);
      layout.font = { color: ink, family: getComputedStyle(document.body).fontFamily, size: narrow ? 12 : 13 };
      layout.hoverlabel = { bgcolor: card, bordercolor: line, font: { color: ink } };
      for (const axis of ["xaxis", "yaxis"]) {
        layout[axis] = { gridcolor: line, linecolor: line, tickcolor: line, fixedrange: byFinger, ...layout[axis] };
      }
      // Plotly else goes by the width that it drew last.
      layout.autosize = !forPrint;
      const named = drawing.data.filter((trace) => trace.name && trace.showlegend !== false).length;
      const bars = drawing.data.filter((trace) => trace.type === "bar");
      if (forPrint) {
        layout.width = paper.width;
        // More names than one line holds take a line each.
        const room = named > 4 ? 15 * named : 0;
        if (named) layout.height = bars.length ? Math.max(paper.height, layout.height) : paper.height + room;
        // The whole width: within the axes' alone each entry would take a line.
        layout.legend = { ...layout.legend, xref: "container", yref: "container", y: 0, yanchor: "bottom", font: { size: 11 } };
      }
      if (byFinger) layout.dragmode = false;
      if (narrow) layout.margin = { ...layout.margin, l: 48, r: 8 };
      for (const note of layout.annotations ?? []) {
        if (narrow && note.font?.size) note.font.size -= 2;
        // The red of lines is too faint for letters.
        if (note.font?.color === "#d0454c") note.font.color = bad;
      }
      const data = structuredClone(drawing.data);
      for (const trace of data) {
        if (trace.error_x) trace.error_x.color = ink;
      }
      // A legend at the bottom of the figure takes a line for each name there.
      if (narrow && layout.legend?.yref === "container") layout.height += 17 * named;
      if (bars.length && narrow) {
        // Beside their names there would be no room for the bars.
        layout.yaxis.showticklabels = false;
        layout.margin.l = 8;
        const isStacked = bars.length > 1;
        layout.bargap = isStacked ? 0.68 : 0.6;
        const names = bars[0].y.map((name) => ({
          text: name, x: 0, xref: "paper", xanchor: "left", y: name, yshift: isStacked ? 16 : 13, showarrow: false, font: { color: ink },
        }));
        layout.annotations = [...(layout.annotations ?? []), ...names];
        if (isStacked) layout.height += 16 * names.length;
      }
      const plot = document.getElementById(`plot-${key}`);
      Plotly.react(plot, data, layout, { responsive: true, displayModeBar: false });
      fit(plot, forPrint);
    }
  };
  const fit = (plot, forPrint) => {
    const box = plot.querySelector(".svg-container");
    const { width, height } = plot._fullLayout;
    box.style.aspectRatio = forPrint ? `${width} / ${height}` : "";
    for (const svg of box.querySelectorAll(".main-svg")) {
      if (forPrint) svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      else svg.removeAttribute("viewBox");
    }
  };
  const redraw = () => draw();
  redraw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("(max-width: 699px)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", redraw);
})();

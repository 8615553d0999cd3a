import { loading, run } from "./client.js";

const out = document.getElementById("out");
loading.addEventListener("progress", ({ detail }) => (out.textContent = `${detail.loadedBytes} of ${detail.totalBytes} bytes`));
try {
  const { output } = await run("forward", { input: [[0, 0], [0.9, 0.9]] });
  out.textContent = Array.from(output.data, (odds) => odds.toFixed(3)).join(" ");
} catch (error) {
  out.textContent = `${error.name}: ${error.message}`;
}

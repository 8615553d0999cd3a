import { load } from "torch-webgpu";
import type { Bundle } from "../public/model/bundle";

const out = document.getElementById("out")!;
try {
  // Vite copies public/ as it is, to where the page is served.
  const model = await load<Bundle>(`${import.meta.env.BASE_URL}model/`, {
    progress: ({ loadedBytes, totalBytes }) => (out.textContent = `${loadedBytes} of ${totalBytes} bytes`),
  });
  const { output } = await model.run("forward", { input: [[0, 0], [0.9, 0.9]] });
  out.textContent = Array.from(await output.read(), (odds) => odds.toFixed(3)).join(" ");
} catch (error) {
  out.textContent = String(error);
}

// What every page does: loads its bundle, says how far it is, what the GPU is, and what to do where it cannot.
import { load, WebGPUUnavailableError } from "./torch-webgpu.js";

export const $ = (selector) => document.querySelector(selector);

const mega = (bytes) => (bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0);

/** The element's text, for people who read and for those who listen. */
export function say(text) {
  $("#status").textContent = text;
}

/** A box in the place of the page, with what went wrong in plain words. */
export function explain(error) {
  console.warn(error);
  const box = document.createElement("section");
  box.className = "card problem";
  box.setAttribute("role", "alert");
  const title = document.createElement("h2");
  const text = document.createElement("p");
  const isMissing = error instanceof WebGPUUnavailableError;
  title.textContent = isMissing ? "This browser cannot use the GPU yet" : "This did not work";
  text.textContent = isMissing
    ? "The page computes with WebGPU. It is in Chrome and Edge, in Safari from version 26 on, and in Firefox on Windows. " +
      "On Linux, switch on chrome://flags/#enable-unsafe-webgpu. What the browser says: " + error.message
    : error.message;
  const again = document.createElement("button");
  again.textContent = "Try again";
  again.onclick = () => location.reload();
  box.append(title, text, again);
  $("main").prepend(box);
  say("");
}

/** The model in a folder beside the page, with its progress in the page's bar. */
export async function start(bundle) {
  const bar = $("progress");
  const begun = performance.now();
  try {
    const model = await load(bundle, {
      autoRestore: true,
      onLost: () => say("The GPU was lost; going on with what was saved last."),
      progress({ loadedBytes, totalBytes, pipelines, totalPipelines }) {
        bar.max = 1;
        bar.value = 0.9 * (loadedBytes / totalBytes) + 0.1 * (pipelines / Math.max(1, totalPipelines));
        say(`Loading ${mega(loadedBytes)} of ${mega(totalBytes)} MB`);
      },
    });
    bar.hidden = true;
    const { description, vendor, architecture } = model.adapterInfo ?? {};
    const name = description || [vendor, architecture].filter(Boolean).join(" ") || "a GPU that gives no name";
    $("#gpu").textContent = `Runs on ${name}, with ${mega(model.statistics.gpuBytes)} MB in its memory`;
    say(`Ready after ${((performance.now() - begun) / 1000).toFixed(1)} s`);
    document.body.dataset.ready = "true";
    return model;
  } catch (error) {
    bar.hidden = true;
    explain(error);
    throw error;
  }
}

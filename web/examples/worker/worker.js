// Loads a bundle, and answers messages {id, entry, inputs} with {id, results} or {id, error}.
import { load } from "./model/torch-webgpu.js";

const loading = load("model/", { progress: (progress) => postMessage({ progress }) });
loading.catch(() => undefined); // the answers say why

onmessage = async ({ data: { id, entry, inputs } }) => {
  try {
    const model = await loading;
    const tensors = Object.entries(await model.run(entry, inputs)); // calls run in the order of messages
    const results = await Promise.all(tensors.map(async ([name, tensor]) => [name, { shape: tensor.shape, data: await tensor.read() }]));
    postMessage({ id, results: Object.fromEntries(results) }, results.map(([, { data }]) => data.buffer));
  } catch ({ name, message }) {
    postMessage({ id, error: { name, message } });
  }
};

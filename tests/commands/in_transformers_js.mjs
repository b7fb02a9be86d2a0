// Answers and outputs of an exported folder in transformers.js: node in_transformers_js.mjs NODE_MODULES JOB.json
// The job: folder, dtype; sources with new_tokens, or rows of ids for a head or an encoder. The answer is JSON.
import { readFileSync } from "node:fs";
import { basename, dirname } from "node:path";

const [modules, path] = process.argv.slice(2);
const js = await import(`${modules}/@huggingface/transformers/dist/transformers.node.mjs`);
const job = JSON.parse(readFileSync(path, "utf8"));
js.env.allowRemoteModels = false;
js.env.localModelPath = dirname(job.folder);
const name = basename(job.folder);
const options = { dtype: job.dtype };

function row(ids) {
  const shape = [1, ids.length];
  return {
    input_ids: new js.Tensor("int64", BigInt64Array.from(ids.map(BigInt)), shape),
    attention_mask: new js.Tensor("int64", new BigInt64Array(ids.length).fill(1n), shape),
  };
}

const result = { version: js.env.version, answers: [], outputs: [], texts: [] };
if (job.new_tokens) {
  const model = await js.AutoModelForSeq2SeqLM.from_pretrained(name, options);
  for (const ids of job.sources) {
    const { input_ids, attention_mask } = row(ids);
    const answer = await model.generate({ inputs: input_ids, attention_mask, max_new_tokens: job.new_tokens });
    result.answers.push(answer.tolist()[0].map(Number));
  }
} else {
  const model = await js[job.class].from_pretrained(name, options);
  for (const ids of job.sources) {
    const output = await model(row(ids));
    result.outputs.push((output.logits ?? output.sentence_embedding ?? output.last_hidden_state).tolist()[0]);
  }
}
console.log(JSON.stringify(result));

"""How a model's card says that it is used: a paragraph of code for each program that runs its format.

A template with `form`, `encoder` (the class of transformers of a model that writes no text, else empty), `head`,
`has_spiece`, `file`, `precision`, `vectors`, `text` (what a user types, worded as in training), `quoted` (that for a
shell), `new_tokens` and `decoding`, as `card.card` gives them.
"""

USAGE = """\
{% set optimum = {
    "none": "ORTModelForFeatureExtraction",
    "sequence": "ORTModelForSequenceClassification",
    "token": "ORTModelForTokenClassification",
} %}
{% set script = {
    "none": "AutoModel",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
} %}
{% set question = vectors.question or text %}
{% if form in ("onnx", "web") and head == "embedding" %}
onnxruntime:

```python
import numpy, onnxruntime, tokenizers

model = onnxruntime.InferenceSession("onnx/model.onnx")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
texts = [{{ question | tojson }}, {{ vectors.text | tojson }}]
vectors = []
for text in texts:
    ids = numpy.array([tokenizer.encode(text).ids])
    inputs = {"input_ids": ids, "attention_mask": numpy.ones_like(ids)}
    vectors.append(model.run(["sentence_embedding"], inputs)[0][0])
print(vectors[0] @ vectors[1])
```

Optimum (`pip install optimum-onnx onnxruntime`):

```python
from optimum.onnxruntime import ORTModelForCustomTasks
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = ORTModelForCustomTasks.from_pretrained(".", subfolder="onnx", file_name="model.onnx")
inputs = tokenizer([{{ question | tojson }}, {{ vectors.text | tojson }}], padding=True, return_tensors="pt")
inputs.pop("token_type_ids", None)
vectors = model(**inputs)["sentence_embedding"]
print(vectors[0] @ vectors[1])
```

transformers.js (`npm i @huggingface/transformers`), the folder's own name and the one around it:

```javascript
import { env, AutoModel, AutoTokenizer } from "@huggingface/transformers";

env.localModelPath = "..";
const name = process.cwd().split("/").pop();
const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await AutoModel.from_pretrained(name, { dtype: "{{ precision }}" });
const texts = [{{ question | tojson }}, {{ vectors.text | tojson }}];
const { sentence_embedding } = await model(tokenizer(texts, { padding: true }));
const [a, b] = sentence_embedding.tolist();
console.log(a.reduce((sum, number, place) => sum + number * b[place], 0));
```
{% if vectors.js_pooling %}

`pipeline("feature-extraction", name, { dtype: "{{ precision }}" })` gives the same vectors with \
`{ pooling: "{{ vectors.js_pooling }}", normalize: {{ "true" if vectors.normalize else "false" }} }`\
{% if vectors.js_pooling == "last_token" %}, one text at a time{% endif %}.
{% else %}

`pipeline("feature-extraction", ...)` pools hidden states by itself and knows no matrix: it gives other vectors.
{% endif %}
{% elif form in ("onnx", "web") and encoder %}
onnxruntime:

```python
import numpy, onnxruntime, tokenizers

model = onnxruntime.InferenceSession("onnx/model.onnx")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
ids = numpy.array([tokenizer.encode({{ text | tojson }}).ids])
(output,) = model.run(None, {"input_ids": ids, "attention_mask": numpy.ones_like(ids)})
print(output)
```

Optimum (`pip install optimum-onnx onnxruntime`):

```python
from optimum.onnxruntime import {{ optimum[head] }}
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = {{ optimum[head] }}.from_pretrained(".", subfolder="onnx", file_name="model.onnx")
output = model(**tokenizer({{ text | tojson }}, return_tensors="pt"))
print(output.{{ "last_hidden_state" if head == "none" else "logits" }})
```

transformers.js (`npm i @huggingface/transformers`), the folder's own name and the one around it:

```javascript
import { env, AutoTokenizer, {{ script[head] }} } from "@huggingface/transformers";

env.localModelPath = "..";
const name = process.cwd().split("/").pop();
const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await {{ script[head] }}.from_pretrained(name, { dtype: "{{ precision }}" });
const output = await model(tokenizer({{ text | tojson }}));
console.log(output.{{ "last_hidden_state" if head == "none" else "logits" }}.tolist());
```
{% elif form in ("onnx", "web") %}
onnxruntime, the encoder once and the decoder token by token, with its keys and values:

```python
import json
import numpy, onnxruntime, tokenizers

config = json.load(open("config.json"))
encoder = onnxruntime.InferenceSession("onnx/encoder_model.onnx")
decoder = onnxruntime.InferenceSession("onnx/decoder_model_merged.onnx")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
ids = numpy.array([tokenizer.encode({{ text | tojson }}).ids])
mask = numpy.ones_like(ids)
(states,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
empty = numpy.zeros((1, config["num_heads"], 0, config["d_kv"]), numpy.float32)
names = [item.name for item in decoder.get_inputs() if item.name.startswith("past_key_values")]
past = dict.fromkeys(names, empty)
answer = [config["decoder_start_token_id"]]
while len(answer) <= {{ new_tokens }} and answer[-1] != config["eos_token_id"]:
    inputs = {"input_ids": numpy.array([answer[-1:]]), "encoder_hidden_states": states, "encoder_attention_mask": mask}
    logits, *present = decoder.run(None, {**inputs, **past, "use_cache_branch": numpy.array([len(answer) > 1])})
    past = dict(zip(names, present))
    answer.append(int(logits[0, -1].argmax()))
print(tokenizer.decode(answer))
```

Optimum (`pip install optimum-onnx onnxruntime`), with beams too:

```python
from optimum.onnxruntime import ORTModelForSeq2SeqLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = ORTModelForSeq2SeqLM.from_pretrained(".")
answer = model.generate(**tokenizer({{ text | tojson }}, return_tensors="pt"), max_new_tokens={{ new_tokens }})
print(tokenizer.decode(answer[0], skip_special_tokens=True))
```

transformers.js (`npm i @huggingface/transformers`), by the name of this folder and where it lies:

```javascript
import { env, pipeline } from "@huggingface/transformers";

env.localModelPath = "..";
const name = process.cwd().split("/").pop();
const answers = await pipeline("text2text-generation", name, { dtype: "{{ precision }}" });
console.log((await answers({{ text | tojson }}, { max_new_tokens: {{ new_tokens }} }))[0].generated_text);
```
{% elif head == "embedding" and form in ("transformers", "sentence-transformers") %}
FrugalT5:

```python
from frugalt5 import Model

model = Model(".")
(query,) = model.embed(["Your question"], prompt_name="query")
documents = model.embed(["A text", "Another text"])
print([float(query @ document) for document in documents])
```

sentence-transformers:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(".")
queries = model.encode_query(["Your question"])
documents = model.encode_document(["A text", "Another text"])
print(model.similarity(queries, documents))
```
{% elif encoder and form == "gguf" %}
```
llama-embedding -m {{ file }} -p {{ quoted }}\
{% if vectors and not vectors.normalize %} --embd-normalize -1{% endif %}
{{ "" }}
```
{% elif encoder and form == "ctranslate2" %}
```python
import ctranslate2, numpy, {{ "sentencepiece" if has_spiece else "tokenizers" }}

encoder = ctranslate2.Encoder(".")
{% if has_spiece %}
tokenizer = sentencepiece.SentencePieceProcessor(model_file="spiece.model")
pieces = [*tokenizer.encode({{ question | tojson }}, out_type=str), tokenizer.id_to_piece(tokenizer.eos_id())]
{% else %}
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
pieces = tokenizer.encode({{ question | tojson }}).tokens
{% endif %}
states = numpy.array(encoder.forward_batch([pieces]).last_hidden_state)[0]
{% if vectors %}
vector = {{ {"mean": "states.mean(0)", "first": "states[0]", "last": "states[-1]"}[vectors.pooling] }}
print(vector{{ " / numpy.linalg.norm(vector)" if vectors.normalize }})
{% else %}
print(states)
{% endif %}
```
{% elif encoder %}
```python
from transformers import AutoTokenizer, {{ encoder }}

tokenizer, model = AutoTokenizer.from_pretrained("."), {{ encoder }}.from_pretrained(".")
output = model(**tokenizer({{ text | tojson }}, return_tensors="pt"))
print(output.{{ "last_hidden_state" if encoder.endswith("EncoderModel") else "logits" }})
```
{% elif form == "transformers" %}
```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForSeq2SeqLM.from_pretrained(".")
answer = model.generate(**tokenizer({{ text | tojson }}, return_tensors="pt"), max_new_tokens={{ new_tokens }})
print(tokenizer.decode(answer[0], skip_special_tokens=True))
```
{% elif form == "gguf" %}
```
llama-completion -m {{ file }} -p {{ quoted }} {{ decoding | join(" ") }}
```

In llama.cpp before December 2025 that program is called `llama-cli`.
{% elif form == "ctranslate2" and has_spiece %}
```python
import ctranslate2, sentencepiece

translator = ctranslate2.Translator(".", compute_type="int8")
tokenizer = sentencepiece.SentencePieceProcessor(model_file="spiece.model")
pieces = [*tokenizer.encode({{ text | tojson }}, out_type=str), tokenizer.id_to_piece(tokenizer.eos_id())]
answer = translator.translate_batch([pieces], {{ decoding | join(", ") }})[0].hypotheses[0]
print(tokenizer.decode(answer))
```
{% elif form == "ctranslate2" %}
```python
import ctranslate2, tokenizers

translator = ctranslate2.Translator(".", compute_type="int8")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
pieces = tokenizer.encode({{ text | tojson }}).tokens
answer = translator.translate_batch([pieces], {{ decoding | join(", ") }})[0].hypotheses[0]
print(tokenizer.decode([tokenizer.token_to_id(piece) for piece in answer]))
```
{% endif %}
"""

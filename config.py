"""Settings to edit: all of them with their defaults, in the classes that the guides name.

Change a line, add one, or paste a class from a guide at the end; `TrainConfig` takes every setting but the model's. An
edited line overrides a trained model and the presets that you did not name. A preset that you name (`--preset`,
`--model_preset`), a file (`--config=FILE`) and flags override an edited line. `python train_low_mem.py plan` shows the
values in effect. docs/settings.md lists the values that each setting may have.

This file is read as text, not run (`settings/edits.py`). In Python: `from config import load`.
"""

from settings.declared import Config
from settings.declared import declared_class as declared
from settings.errors import DoesNotFit, UserError
from settings.loading import load

__all__ = ["Config", "DoesNotFit", "T5ModelConfig", "TrainConfig", "UserError", "load"]


@declared
class T5ModelConfig:
    """The shape of a T5 model. Names and meaning follow the T5 paper and Hugging Face's `T5Config`."""

    model_preset = "tiny"  # its shape replaces all lines below but those that are edited
    vocab_size = 32128  # vocabulary size
    d_model = 512  # hidden size
    d_kv = 64  # size of one attention head, independent of d_model
    d_ff = 2048  # inner size of the feed-forward layers
    num_layers = 6  # encoder blocks; set alone, it also sets num_decoder_layers if both stacks of the preset are equal
    num_decoder_layers = 6  # decoder blocks; 0: encoder only, which needs --head; 0 with a head
    num_heads = 8  # attention heads
    relative_attention_num_buckets = 32  # buckets of the relative position bias
    relative_attention_max_distance = 128  # distance beyond which positions share one bucket
    dropout_rate = 0.0  # dropout probability in training
    layer_norm_epsilon = 1e-06  # epsilon of the RMS norms
    initializer_factor = 1.0  # factor on T5's initial standard deviations
    feed_forward_proj = "relu"  # activation function
    # share one table between embedding and output; True with a head, even if the preset has False
    tie_word_embeddings = True
    # scale the output by d_model^-0.5 (T5 1.0); True with a head, even if the preset has False
    scale_decoder_outputs = True
    bias_in_every_layer = False  # one position bias table per block (UMT5)
    pad_token_id = 0  # id of the padding token
    eos_token_id = 1  # id of the end-of-sequence token
    decoder_start_token_id = None  # id of the first decoder token; none: pad_token_id
    # output of the model: text, sequence (a label per row), token (a label per token), embedding (one per text) or none
    # (the encoder's hidden states)
    head = "text"
    # labels of the head: regression, the number of classes, or the names of the classes separated by commas; auto: from
    # the data
    labels = "auto"
    # what a sequence or embedding head reads: the mean over all tokens, the first token or the last one; auto: last
    # with a decoder, else mean
    pooling = "auto"
    # layers of the head: dense (dropout, dense, tanh, dropout, out) or linear (dropout, out); auto: dense for sequence,
    # linear for token
    head_kind = "auto"
    embedding_size = 0  # dimension of the embeddings, by a dense layer after the pooling; 0: d_model, no dense layer
    normalize = True  # normalise embeddings to length 1


@declared
class TrainConfig:
    """Steps, batch size, optimizer, learning rate, evaluation and checkpoints."""

    is_finetune = False  # finetune a trained model on prompt and response pairs
    # resume the last run of this output folder exactly where it stopped; auto: resume run_name if it exists, else start
    # it
    is_keep_training = False
    # model folder to start from, hf://OWNER/NAME, or with allow_download a Hugging Face hub name; auto: the newest
    # finished pretraining run whose tokenizer suits the data, else none; none: random weights
    finetune_from = "auto"
    # download finetune_from from the Hugging Face hub, or the mirror in HF_ENDPOINT, into models/
    allow_download = False
    max_steps = "auto"  # training steps; auto: from epochs
    epochs = "auto"  # passes over the data, if max_steps is auto; auto: 1, or 3 with is_finetune
    # rows per step over all micro-batches and processes; auto: 32, or 8 on a machine with less than 13 GB of RAM; an
    # explicit number is never changed
    effective_batch_size = "auto"
    batch_size_per_gpu = "auto"  # micro-batch size: rows per forward pass
    eval_batch_size_per_gpu = "auto"  # micro-batch size in evaluation
    gradient_accumulation_steps = "auto"  # micro-batches per step and process
    # compile blocks with torch at the first steps, which takes about a minute; auto: on NVIDIA GPUs, for runs of 500
    # steps or more
    compile = "auto"
    # adafactor (T5's own), adamw_rms (AdamW scaled by each weight's RMS), adamw_8bit (adamw_rms with 8-bit moments),
    # adamw, or muon (lowest loss per token); adamw with adapters
    optimizer = "adafactor"
    # peak learning rate; auto: depends on optimizer, model size, steps and starting point (docs/finetuning.md)
    learning_rate = "auto"
    # learning rate schedule after the warmup; wsd: constant, then linear to zero over the last third
    lr_schedule = "cosine"
    warmup_steps = "auto"  # steps of linear warmup; auto: a tenth of all, at most 10000
    weight_decay = 0.0  # decoupled weight decay, multiplied by the learning rate; norms and position biases are exempt
    freeze = None  # parameters to freeze, such as encoder,embedding or *.q.weight; none: all are trained
    # clip the global gradient norm; 0: off (needs all gradients at once; adafactor clips per tensor)
    max_grad_norm = 0.0
    label_smoothing = 0.0  # label smoothing
    # weight of each class in the loss of a head: numbers separated by commas, in the order of the labels, or balanced
    # (inverse to their frequency); none: 1 each
    class_weights = None
    # contrastive (all other texts of the step are negatives), cosent or regression (graded similarity), or distillation
    # (teacher_vectors); auto: by the columns of the rows
    embedding_loss = "auto"
    contrastive_temperature = 0.05  # temperature of the contrastive and cosent losses
    # Matryoshka dimensions, such as 256,128,64: the loss is summed over embeddings truncated to each; none: the full
    # dimension alone
    matryoshka_sizes = None
    eval_steps = "auto"  # steps between evaluations; auto: a fifth of all, at most 1000
    eval_rows = 64  # maximum validation rows per evaluation; 4096 with a head
    save_steps = "auto"  # steps between checkpoints; auto: a tenth of all, at most 1000
    keep_latest_n_ckp = 2  # recent checkpoints to keep besides the best
    # average this many of the last checkpoints at the end, and publish the average if it scores better than the best of
    # them, as it often does with --lr_schedule=constant; 0: off
    average_checkpoints = 0
    log_steps = 10  # steps between lines of output if it does not go to a terminal
    sample_rows = 3  # validation rows whose answers are shown as samples at the end
    early_stopping_evals = 0  # stop after this many evaluations in a row without improvement; 0: never
    # metric that selects the best checkpoint: loss, a score of answers (exact_match, f1, bleu, chrf, chrf++,
    # geometric_mean, rouge_1, rouge_2, rouge_l, rouge_lsum, char_bleu, identical, recall@K, ndcg@K, mrr), of labels
    # (accuracy, macro_f1, matthews, spearman, pearson, mse), of vectors (spearman, pearson, recall@1, recall@10,
    # mrr@10, ndcg@10) or a metric of your own in Python; NAME/loss for one of several validation sets
    metric_for_best = "loss"


@declared
class DataConfig:
    """The data, and how it becomes training examples."""

    # file, folder, glob or address (s3://, hf://OWNER/NAME) to train on, or several separated by commas; none: the
    # built-in sample
    train_file = None
    # evaluation data, several sets by name: news=a.jsonl,law=b.jsonl; none: one row in a hundred is held out
    validation_file = None
    # text column for pretraining; if set, the run trains on this text even if the file has prompts and responses; for
    # --head=embedding the columns of the texts, separated by commas
    text_column = "text"
    # label column for --head: one label per text, a list or string with one label per token, or for embedding the
    # similarity of two texts
    label_column = "label"
    query_prompt = None  # prompt before the first text of each row, the query
    document_prompt = None  # prompt before the other texts of each row, the documents
    # teacher embeddings to distil, one for each row of train_file: .npy, or .parquet with a column vector, as embed
    # writes it
    teacher_vectors = None
    # preparation of protein sequences: prott5 (letters separated by spaces; U, Z, O and B become X), prostt5 (also
    # <AA2fold> in front) or ankh (each letter encoded separately)
    prepare_text = "none"
    prompt_column = "prompt"  # prompt column of pairs
    response_column = "response"  # response column of pairs
    chosen_column = "chosen"  # column with the better answer of a preference
    rejected_column = "rejected"  # column with the worse answer of a preference
    # column with whole conversations; auto: messages or conversations, if there are no prompt and response columns
    messages_column = "auto"
    history_column = None  # column with earlier turns of a pair, such as [[question, answer], ...]
    expand_turns = False  # train on every answer of a conversation instead of only the last
    # prompt format: plain, chat, alpaca, question, chat_zh, chat_template (the tokenizer's own), a text with {prompt}
    # (and {system}), or Jinja; auto: the one the model was trained with, else the tokenizer's, else plain
    prompt_template = "auto"
    source_prefix = "auto"  # text before every prompt, such as 'summarize: '; auto: the one the model was trained with
    tokenizer_dir = "auto"  # folder with tokenizer.json; auto: the model's own, else a new one is trained
    # file of tokens, one per line, that are added to the tokenizer and to the model's embedding; none: no tokens
    extra_tokens = None
    # training objective; for text: span, ul2, prefix or denoise (single tokens masked, whole text as target, as in
    # ProtT5); auto: span for text, pairs for prompt and response; preferences for dpo, sequence or token with such a
    # head, span if text_column is set
    objective = "auto"
    max_seq_len = 512  # maximum encoder input; 65536 with a head, so that nothing is cut
    max_target_len = "auto"  # maximum decoder input; auto: what span corruption needs, or max_seq_len for pairs
    noise_density = 0.15  # fraction of tokens that span corruption and denoise mask
    mean_noise_span_length = 3.0  # mean length of a masked span
    max_samples = None  # maximum rows of the training data to use
    group_by_length = True  # put rows of similar length into the same micro-batch (pairs)
    # sampling weights of the parts of train_file, such as 0.7,0.3; none: every row once per epoch
    mixture_weights = None
    batch_tokens = 0  # maximum tokens in a micro-batch; 0: no limit
    skip_bad_rows = False  # skip and count broken rows instead of stopping at the first
    cache_dir = "data/cache"  # folder for token shards and the built-in corpus


@declared
class PreferenceConfig:
    """Preference training: DPO, IPO, ORPO."""

    preference_loss = "sigmoid"  # sigmoid (DPO), ipo (mean log-probabilities) or orpo (no reference model)
    beta = 0.1  # how strongly the model is held to the reference model; with orpo the weight of the odds-ratio loss


@declared
class LoraConfig:
    """Adapters trained on top of frozen weights: LoRA."""

    lora_rank = 0  # LoRA rank; 0: no adapters, all weights are trained
    lora_alpha = "auto"  # adapters are scaled by alpha / rank; auto: twice the rank
    lora_dropout = 0.0  # dropout on the input of the adapters
    lora_targets = "auto"  # matrices that get adapters: any of q,k,v,o,wi,wi_0,wi_1,wo, or all; auto: q,v
    # ids of tokens whose embeddings are trained together with the adapters, such as 32100-32227; auto: the ids that
    # extra_tokens adds
    lora_tokens = "auto"
    # dtype of the frozen weights; auto: fp32 or bf16 by mixed_precision, int8 if neither fits; int4 only on request
    lora_base = "auto"


@declared
class MemoryConfig:
    """The memory budget, and the techniques that keep to it."""

    # maximum memory of the process tree of one rank; on a GPU the same amount again of GPU memory; auto: what is free
    # on this machine
    memory_budget = "auto"
    # standard (keeps all activations, fastest), low (much less memory; up to 5% slower, up to 20% for narrow models),
    # ultra (least memory: recomputes all blocks, bf16 weights); auto: the fastest that fits with weights in memory
    memory_mode = "auto"
    # measure the memory of the largest steps in a child process before the run; auto: if the plan is near the budget
    probe = "auto"
    ultra_low_mem = "auto"  # reopen the Arrow file for every read; auto: if less than 13 GB are available
    # no (fp32), bf16, or fp16 (fp16 matrix products, bf16 weights); auto: what is fast on this device and fits
    mixed_precision = "auto"
    gradient_checkpointing = "auto"  # recompute activations in backward; auto: if the plan needs it
    # where the weights of blocks are kept while not in use: device, or offloaded to ram (GPUs only) or to a file; auto:
    # the first that fits unless a later one is clearly faster, and in a file only the blocks that do not fit elsewhere
    weights_in = "auto"
    weights_dir = "auto"  # folder of the file with offloaded weights during the run; auto: output_dir


@declared
class RunConfig:
    """Names, folders, device and output."""

    run_name = "auto"  # folder under output_dir and log_dir; auto: pretrain_ or finetune_ plus the time
    output_dir = "model_save"  # folder for models and checkpoints
    log_dir = "logs"  # folder for logs and metrics
    overwrite = False  # replace an existing run of that name
    seed = 42  # seed of initial weights, data order, masks and dropout
    device = "auto"  # device to compute on; auto: CUDA, then MPS, then CPU
    num_threads = "auto"  # CPU threads per process; auto: one per core, fewer while other programs work
    compiled_kernels = "auto"  # C kernels, compiled on first use; auto: on Linux CPUs with gcc
    # language of the messages on the screen; auto: from LC_ALL, LC_MESSAGES or LANG, else en; the log is in English
    # except for its memory lines
    language = "auto"
    # experiment trackers to report to, separated by commas: tensorboard, wandb, trackio, mlflow, aim, comet_ml,
    # clearml, dvclive, swanlab; none: nothing leaves this machine
    log_with = None
    # Hugging Face Hub repository to upload the finished model and its card to, OWNER/NAME or NAME; needs a login (hf
    # auth login or HF_TOKEN); none: nothing is uploaded
    push_to_hub = None
    quiet = False  # print only results, warnings and errors; the log stays complete


@declared
class TokenizerConfig:
    """How a tokenizer is trained."""

    # bpe (byte-level), unigram, byte (ByT5, needs no training), words (split at spaces, for phonemes and the like), or
    # letters (one token per letter); auto: letters for proteins, else bpe
    tokenizer_type = "auto"


@declared
class CleaningConfig:
    """Which rows are dropped before training."""

    clean = False  # normalise text and drop rows that are too short, have few letters or repeat themselves
    dedup = "none"  # drop rows whose texts equal those of an earlier row (exact); none: keep all rows


@declared
class PrepareConfig:
    """How token shards are written."""

    shards_dir = "auto"  # folder for the token shards; auto: under cache_dir
    preview = 0  # show this many examples exactly as the model receives them, without writing shards
    prepare_workers = "auto"  # encoding processes; 0: none; auto: one per core, at most 4


@declared
class PlanConfig:
    """The machine to plan for, and the form of the output."""

    # machine to plan for: a name from presets/machines.yaml or a YAML file; auto: this one; with json, several
    # separated by commas
    target = "auto"
    json = False  # print JSON for other programs; chat also reads it, one line per question


@declared
class CheckpointConfig:
    """The trained model to use."""

    model = "auto"  # model folder; auto: the base of the adapter, else the newest run in output_dir
    adapter = None  # adapter folders for the model, separated by commas; the first is active


@declared
class ConvertConfig:
    """What a converted model looks like."""

    dtype = "keep"  # dtype of the weights
    # read pytorch_model.bin or adapter_model.bin where there is no safetensors file (torch's weights-only loader)
    allow_pickle = False


@declared
class ExportConfig:
    """The format to export to."""

    # gguf (llama.cpp), ctranslate2, onnx (transformers.js, Optimum, onnxruntime) or web (onnx, and a page that answers
    # in the browser); each needs the package of its name, onnx and web also onnxruntime
    format = None
    # smaller numbers for the matrices; onnx keeps the fp32 files and gets files with this suffix beside them
    quantize = "none"
    # folder of a copy of transformers.js that the page loads (node_modules/@huggingface/transformers/dist); none: its
    # public address
    js = None


@declared
class GenerateConfig:
    """How answers are decoded."""

    # maximum answer; unless set, the value in the model's folder, which is the longest answer it was trained on
    max_new_tokens = 128
    min_new_tokens = 0  # minimum answer
    temperature = 0.0  # 0: greedy decoding; above 0: sampling
    top_k = 0  # sample from the k most likely tokens; 0: all
    top_p = 1.0  # sample from the most likely tokens with this total probability
    num_beams = 1  # number of beams; 1: no beam search
    length_penalty = 1.0  # a beam's score is divided by length^this: above 0 favours long answers
    # end a beam search when there are num_beams answers (True), when better ones are unlikely (False), or impossible
    # (never)
    early_stopping = "False"
    repetition_penalty = 1.0  # penalty on tokens that were already generated; 1: none, 1.2: strong
    no_repeat_ngram_size = 0  # forbid repeating any sequence of this many tokens; 0: off
    # answer longer prompts in parts of about equal length, cut at the ends of sentences or at spaces, and join the
    # answers; 0: off
    split_prompts = 0


@declared
class AnswerConfig:
    """Prompts, and where the answers go."""

    # a text, a file of prompts (text, JSONL, CSV, Parquet, Arrow, FASTA), or - for lines of standard input
    input = None
    # JSONL file for answers or predicted labels, .npz, .parquet or .h5 for vectors, or folder for a new model;
    # interrupted files are continued; none: the screen
    output = None
    generate_batch_size = "auto"  # prompts answered at once; auto: what the budget allows
    # all answers that are allowed: a file with one per line or a response_column, or two or more separated by commas;
    # auto: answers.txt in the model's folder, if it exists (in training: none); none: any answer
    answers = "auto"
    # best answers per prompt, written with log-probabilities or scored by rank; needs num_beams to be at least as large
    num_answers = 1


@declared
class EmbedConfig:
    """Which vectors of texts are written."""

    # auto: one vector per text, by the model's embedding head, or without one as mean; mean: hidden states averaged
    # over the text's tokens; token: one vector per token
    vectors = "auto"
    # which prompt of the model is put before each text: query (its query_prompt), document (its document_prompt) or
    # none
    prompt_name = "document"
    # numbers to which each vector is cut, and scaled to length 1 again; for models trained with matryoshka_sizes; none:
    # all
    truncate_dim = None


@declared
class SearchConfig:
    """What is searched, and what is written of what is found."""

    corpus = None  # file or folder of the texts that are searched; their vectors are kept in cache_dir
    num_documents = 10  # texts of the corpus per query, the nearest first
    # hard negatives per query: rows to train on are written (query, pos, neg) instead of what is found; the input needs
    # a positive beside each query; 0: none
    num_negatives = 0
    # a negative's cosine with the query is below that of the positive by at least this share of it
    relative_margin = 0.05


@declared
class MetricsConfig:
    """How answers are scored."""

    # scores of answers, separated by commas: exact_match, f1, bleu, chrf, chrf++, geometric_mean, rouge_1, rouge_2,
    # rouge_l, rouge_lsum, char_bleu, identical, and with num_answers recall@K, ndcg@K, mrr; auto: all
    metrics = "auto"
    # rows to answer and score per evaluation; auto: none in training, the first 256 pairs in evaluate and export
    eval_generate_rows = "auto"


@declared
class ChatConfig:
    """The conversation in the terminal."""

    system_prompt = None  # system prompt of the conversation
    # earlier questions and answers that the model sees; auto: all that fit if it was trained on conversations, else
    # none
    history_turns = "auto"


@declared
class BoardConfig:
    """Address, access and files of the page and the API."""

    host = "127.0.0.1"  # address to listen on; one that others can reach always requires a token
    port = "auto"  # port to listen on; 0: any free one; auto: 8300 for the page, 8400 for the API
    # password of the page and key of the API; auto: none if only this machine can connect, else a random one is printed
    token = "auto"
    data_dir = "data/files"  # folder for data files and uploads


@declared
class ListingConfig:
    """Deleting runs."""

    delete = None  # name of a run to delete, with its model and checkpoints
    yes = False  # delete without asking

"""How a run is set up: six stages fill one `ResolvedRun`, one file each, in this order.

`identify` (new or resumed, its name and lock), `base` (weights, adapters, shape), `data` (rows prepared and opened,
tokenizer), `machine` (device, budget), `plan` (micro-batch, what is recomputed, peak; probed), `commit` (disk, the
run's folder). The first three import no torch. Nothing is written for the run before `commit`, and everything that can
be refused is refused before that. Beside the stages: `build` makes model and engine, `schedules` the learning rates,
`dpo_reference` the log-probabilities that preferences are compared with, `answer_list` the list that answers come from,
`start` which folder weights are from.
"""

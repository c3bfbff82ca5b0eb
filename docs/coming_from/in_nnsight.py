"""Ten tasks in nnsight."""

# %% load
import torch
from nnsight import TransformersModel, save

torch.set_grad_enabled(False)
model = TransformersModel(
    "./smollm2", task="text-generation", dtype=torch.float32, dispatch=True
)
blocks, tokenizer = model.model.layers, model.tokenizer

# %% states
text = "The capital of France is Paris."
with model.trace(text):
    stream = save([model.model.embed_tokens.output])
    for block in blocks:
        stream.append(block.output)
    after_norm = model.model.norm.output[0].save()
stream = torch.cat(stream)  # [layer, token, width]

# %% ragged
texts = ["Paris.", "The capital of France is Paris.", "It rained all day in Berlin."]
with model.trace(texts):
    padded = blocks[11].output.save()
# A decoder's texts are padded on the left.
lengths = [len(tokenizer.encode(sentence)) for sentence in texts]
rows = [states[-length:] for states, length in zip(padded, lengths, strict=True)]

# %% stop
with model.trace(text) as tracer:
    state = blocks[5].output[0].save()
    tracer.stop()

# %% lens
prompt = "The capital of France is"
with model.trace(prompt):
    last = save([model.model.embed_tokens.output[0, -1]])
    for block in blocks:
        last.append(block.output[0, -1])
    shares = model.lm_head(model.model.norm(torch.stack(last))).softmax(-1).save()
words = [tokenizer.decode(best) for best in shares.argmax(-1)]
probability = shares[:, tokenizer.encode(" Paris")[0]]

# %% edit
with model.trace(prompt):
    blocks[4].output[:, -1] = 0
    logits = model.output.logits[0, -1].save()

# %% patch
corrupt = "The capital of Germany is"
answer, other = (tokenizer.encode(word)[0] for word in (" Paris", " Berlin"))


def difference(logits):
    return (logits[0, -1, answer] - logits[0, -1, other]).item()


with model.trace(prompt):
    clean = save([])
    for block in blocks:
        clean.append(block.input)
    best = model.output.logits.save()
with model.trace(corrupt):
    worst = model.output.logits.save()
best, worst = difference(best), difference(worst)
effect = torch.zeros(len(blocks), clean[0].shape[1])
for layer in range(len(blocks)):
    for token in range(effect.shape[1]):
        with model.trace(corrupt):
            blocks[layer].input[:, token] = clean[layer][:, token]
            patched = model.output.logits.save()
        effect[layer, token] = (difference(patched) - worst) / (best - worst)

# %% steer
with model.trace(corrupt):
    toward = blocks[24].output[0, -1].save()
with model.trace(prompt):
    away = blocks[24].output[0, -1].save()
with model.generate(prompt, max_new_tokens=8, do_sample=False) as tracer:
    for step in tracer.iter[:8]:
        blocks[24].output[:] += toward - away
    ids = tracer.result.save()
written = tokenizer.decode(ids[0])

# %% probe
import pandas
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

cities = pandas.read_csv("cities.csv")
with model.trace(list(cities["text"])) as tracer:
    vectors = blocks[23].output[:, -1].save()
    tracer.stop()
probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01))
accuracy = cross_val_score(probe, vectors.numpy(), cities["label"], cv=5).mean()

# %% store
from safetensors.torch import load_file, save_file

with model.trace(list(cities["text"])) as tracer:
    padded = blocks[11].output.save()
    tracer.stop()
lengths = [len(tokenizer.encode(sentence)) for sentence in cities["text"]]
states = [rows[-length:] for rows, length in zip(padded, lengths, strict=True)]
save_file({"layer.12": torch.cat(states)}, "states.safetensors")
stored = load_file("states.safetensors")["layer.12"]

# %% port
import copy

broken = copy.deepcopy(model._module)
broken.model.layers[7].self_attn.scaling *= 1.01
port = TransformersModel(broken, tokenizer=tokenizer)
with model.trace(text):
    ours = save([])
    for block in model.model.layers:
        ours.append(block.output)
with port.trace(text):
    theirs = save([])
    for block in port.model.layers:
        theirs.append(block.output)
apart = [not torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True)]
# The output of the block at place k is layer k + 1.
first = apart.index(True) + 1

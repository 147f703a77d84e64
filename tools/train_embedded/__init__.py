"""How the embedded checkpoint is made: generated text, a small trainer, a held-out evaluation, export and model card.

python -m torch.distributed.run --nproc-per-node 2 -m tools.train_embedded.train --out RUN --threads 1 --compile
python -m tools.train_embedded.export RUN FOLDER
python -m tools.train_embedded.evaluate FOLDER --json RUN/evaluation.json
python -m tools.train_embedded.card FOLDER --evaluation RUN/evaluation.json …
"""

"""A user of Long Range Arena trains and tests a mask of their own on a small ListOps."""

from benchmarks.lra.__main__ import main

settings = [
    "--data.task=listops-small",
    "--data.source=generated",
    '--data.sizes={"train": 200, "validation": 20, "test": 100}',
    '--model.architecture={"embed_dim": 32, "num_heads": 2, "n_layers": 1, "mask": "butterfly | local(window=32)"}',
    "--data.workers=0",
    "--trainer.max_steps=10",
    "--trainer.val_check_interval=5",
    "--trainer.default_root_dir=out/mine",
]
main(["fit", *settings])
main(["test", *settings, "--ckpt_path=last"])

"""A parameter that an algorithm does not have, or a value of another type, is a type error.

Each line with an ignore is wrong; one that a type checker accepts fails as an unnecessary ignore.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

import agl


def right() -> None:
    agl.GRPO(tunes="small", optim={"lr": 1e-5}, lora={"rank": 16}, estimator="rloo")
    agl.GRPO({"optim": {"lr": 1e-5}}, agents="write")
    agl.SFT(data="dialogues.jsonl")
    agl.APO(optimizer={"base_url": "http://127.0.0.1:8000/v1"}, budget="light", texts={"filled": ["draft"]})
    agl.GEPA(optimizer="judge", budget=60)
    agl.VERL({"trainer": {}}, engine="ray", data={"train_batch_size": 8})


def wrong() -> None:
    agl.GRPO(learning_rate=1e-5)  # pyright: ignore[reportCallIssue]
    agl.GRPO(group_size="8")  # pyright: ignore[reportArgumentType]
    agl.PPO(estimator="rloo")  # pyright: ignore[reportCallIssue]
    agl.DPO(pairs="some")  # pyright: ignore[reportArgumentType]
    agl.SFT(dataset="dialogues.jsonl")  # pyright: ignore[reportCallIssue]
    agl.APO(optimiser="judge")  # pyright: ignore[reportCallIssue]
    agl.GEPA(budget=[1])  # pyright: ignore[reportArgumentType]

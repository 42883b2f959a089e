"""An agent that answers a question with the prompt that is tuned: `answer_prompt` of experiment.toml."""

from openai import OpenAI


def solve(task, answer_prompt):
    """Return the answer to one question."""
    messages = [{"role": "user", "content": answer_prompt.format(question=task["question"])}]
    with OpenAI() as client:
        answer = client.chat.completions.create(model="small", messages=messages)
    return (answer.choices[0].message.content or "").strip()

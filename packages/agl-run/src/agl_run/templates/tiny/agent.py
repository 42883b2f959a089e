"""An agent that answers a question: ordinary code of the `openai` client."""

from openai import OpenAI

client = OpenAI(api_key="none")  # its calls go to the model in training


def solve(task):
    """Return the answer to one question."""
    messages = [{"role": "user", "content": task["question"]}]
    answer = client.chat.completions.create(model="small", messages=messages)
    return (answer.choices[0].message.content or "").strip()

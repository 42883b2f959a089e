"""A graph that answers a question: a node asks the model, and asks again where the answer is not a colour."""

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

COLOURS = {"green", "red", "white", "yellow"}
TRIES = 2

model = ChatOpenAI(model="small", api_key="none")  # its calls go to the model in training


def write(state: MessagesState):
    """Write an answer to the question."""
    return {"messages": [model.invoke(state["messages"][:1])]}


def is_good(state: MessagesState):
    """Go on to the end with a colour, or after the last try."""
    answers = state["messages"][1:]
    return END if answers[-1].text.strip() in COLOURS or len(answers) == TRIES else "write"


builder = StateGraph(MessagesState)
builder.add_node("write", write)
builder.add_edge(START, "write")
builder.add_conditional_edges("write", is_good)
graph = builder.compile(name="colours")


def solve(task):
    """Return the answer to one question."""
    return graph.invoke({"messages": [("user", task["question"])]})["messages"][-1].text.strip()

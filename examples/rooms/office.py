"""The office of the example: its meeting rooms, the two tools that read about them, and which room is right."""

from typing import Any

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
ROOMS: dict[str, dict[str, Any]] = {
    "ash": {"capacity": 12, "equipment": ["whiteboard", "phone"], "step_free": False, "repairs": "Monday"},
    "beech": {"capacity": 24, "equipment": ["screen", "whiteboard"], "step_free": True, "repairs": "Thursday"},
    "cedar": {"capacity": 6, "equipment": ["screen", "whiteboard"], "step_free": False, "repairs": "Friday"},
    "elm": {"capacity": 14, "equipment": ["screen", "phone"], "step_free": False, "repairs": ""},
    "fir": {"capacity": 8, "equipment": ["screen"], "step_free": True, "repairs": "Wednesday"},
    "hazel": {"capacity": 10, "equipment": ["screen", "whiteboard", "phone"], "step_free": True, "repairs": ""},
    "larch": {"capacity": 4, "equipment": ["screen"], "step_free": True, "repairs": "Tuesday"},
    "maple": {"capacity": 6, "equipment": ["whiteboard"], "step_free": True, "repairs": ""},
    "oak": {"capacity": 20, "equipment": ["screen", "whiteboard", "phone"], "step_free": True, "repairs": ""},
    "pine": {"capacity": 4, "equipment": [], "step_free": False, "repairs": ""},
}


def is_free(room: str, day: str, hour: int) -> bool:
    """Return true if a room has no meeting then; a fixed pattern, in which oak is always free."""
    return room == "oak" or (sum(map(ord, room)) + 3 * DAYS.index(day) + hour) % 4 != 0


def find_free_rooms(day: str, hour: int) -> list[str]:
    """The first tool: names of the rooms without a meeting, alphabetically."""
    return [room for room in ROOMS if is_free(room, day, hour)]


def room_details(room: str) -> dict[str, Any]:
    """The second tool: what is known of a room."""
    return ROOMS.get(room, {"error": f"there is no room {room!r}; find free rooms first"})


def faults(room: str, needs: dict[str, Any]) -> list[str]:
    """The faults of a room for a meeting, one sentence each; empty when it fits."""
    if room not in ROOMS:
        return [f"There is no room {room or 'in the answer'}."]
    about = ROOMS[room]
    missing = [thing for thing in needs["equipment"] if thing not in about["equipment"]]
    found = [f"{room} has no {thing}." for thing in missing]
    if about["capacity"] < needs["people"]:
        found.append(f"{room} seats {about['capacity']}, but {needs['people']} people come.")
    if about["repairs"] == needs["day"]:
        found.append(f"{room} is closed for repairs on {needs['day']}.")
    if needs["wheelchair"] and not about["step_free"]:
        found.append(f"{room} cannot be reached without steps.")
    if not is_free(room, needs["day"], needs["hour"]):
        found.append(f"{room} is taken at that time.")
    return found


def best_room(needs: dict[str, Any]) -> str:
    """The smallest room that fits; the first by name of equal ones; empty when none does."""
    fitting = [room for room in ROOMS if not faults(room, needs)]
    return min(fitting, key=lambda room: (ROOMS[room]["capacity"], room), default="")


def judge(room: str, needs: dict[str, Any]) -> tuple[float, str]:
    """Score and feedback of a booking: 1 for the smallest room that fits, 0.5 for a larger one, else 0."""
    wrong = faults(room, needs)
    if wrong:
        return 0.0, " ".join(wrong)
    best = best_room(needs)
    if ROOMS[room]["capacity"] > ROOMS[best]["capacity"]:
        return 0.5, f"{room} is larger than needed: {best} fits as well."
    return 1.0, ""

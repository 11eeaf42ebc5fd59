"""Generate conversations of an agent that sells ferry tickets, with tool calls, in OpenAI's form.

All of them begin with the same rules. A number always gives the same conversation.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

Message = dict[str, Any]

PORTS = ("Ullapool", "Stornoway", "Oban", "Craignure", "Mallaig", "Armadale", "Uig", "Tarbert")
FIRST = ("Mara", "Jon", "Ines", "Tomas", "Aila", "Piet", "Rhona", "Luca", "Sunniva", "Owen")
LAST = ("Falk", "Brody", "Castell", "Niven", "Ostrom", "Quist", "Rae", "Teller", "Munro", "Vance")
KINDS = ("a dog", "a bicycle", "a small car", "a camper van")
WISHES = (
    "book a crossing from {a} to {b} on {day}",
    "move my crossing from {a} to {b} to {day}",
    "cancel the crossing from {a} to {b} that I booked for {day}",
    "add {kind} to my crossing from {a} to {b} on {day}",
)

RULES = (Path(__file__).parent / "rules.md").read_text()


class _Desk:
    """One traveller at the desk, with the conversation so far."""

    def __init__(self, number: int) -> None:
        self.draw = random.Random(f"ferry {number}")
        pick = self.draw.choice
        self.first, self.last = pick(FIRST), pick(LAST)
        self.user = f"{self.first.lower()}_{self.last.lower()}_{self.draw.randint(1000, 9999)}"
        self.booking = "".join(self.draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", k=6))
        self.origin, self.destination = self.draw.sample(PORTS, 2)
        self.day = f"2025-06-{self.draw.randint(4, 28):02}"
        self.kind = pick(KINDS)
        self.said: list[Message] = [{"role": "system", "content": RULES}]

    def user_says(self, text: str) -> None:
        self.said.append({"role": "user", "content": text})

    def agent_says(self, text: str) -> None:
        self.said.append({"role": "assistant", "content": text})

    def calls(self, name: str, result: Any, **arguments: str) -> None:
        identity = "call_" + "".join(self.draw.choices("abcdefghijkmnopqrstuvwxyz0123456789", k=16))
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": identity, "type": "function", "function": function}
        self.said.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = result if isinstance(result, str) else json.dumps(result)
        self.said.append({"role": "tool", "tool_call_id": identity, "name": name, "content": text})

    def profile(self) -> dict[str, Any]:
        return {
            "name": {"first": self.first, "last": self.last},
            "email": f"{self.first}.{self.last}@example.org".lower(),
            "born": f"19{self.draw.randint(50, 99)}-{self.draw.randint(1, 12):02}-11",
            "pass": self.draw.choice(("none", "blue", "silver", "golden")),
            "payment": {
                f"card_{self.draw.randint(1000, 9999)}": {"kind": "card"},
                f"gift_{self.draw.randint(1000, 9999)}": {"kind": "gift card", "left": 45},
            },
            "bookings": [self.booking],
        }

    def crossings(self) -> list[dict[str, Any]]:
        return [
            {
                "crossing": f"F{self.draw.randint(100, 999)}",
                "origin": self.origin,
                "destination": self.destination,
                "leaves": f"{hour:02}:{self.draw.choice(('05', '20', '40'))}",
                "state": "open",
                "free": {"deck": self.draw.randint(1, 60), "lounge": self.draw.randint(0, 20)},
                "price": {"deck": self.draw.randint(9, 30), "lounge": self.draw.randint(31, 60)},
            }
            for hour in range(7, 7 + 3 * self.draw.randint(2, 4), 3)
        ]

    def find(self) -> None:
        found = self.crossings()
        self.calls(
            *("find_crossings", found),
            origin=self.origin,
            destination=self.destination,
            day=self.day,
        )
        lines = [
            f"{i}. **{c['crossing']}** leaves at {c['leaves']}: deck {c['price']['deck']}, "
            f"lounge {c['price']['lounge']}, with {c['free']['lounge']} lounge places left"
            for i, c in enumerate(found, 1)
        ]
        self.agent_says(
            f"These crossings from {self.origin} to {self.destination} are open on {self.day}:\n\n"
            + "\n".join(lines)
            + "\n\nWhich of them would you like, and in which place?"
        )

    def change(self) -> None:
        crossing = f"F{self.draw.randint(100, 999)}"
        price = self.draw.randint(31, 60)
        self.user_says(f"Let me take {crossing}, in the lounge, and charge my card for the rest.")
        self.calls("calculate", str(float(price + 40)), expression=f"{price} + 40")
        self.agent_says(
            f"To be sure before I change anything:\n\n- **Crossing**: {crossing} on {self.day}\n"
            f"- **Place**: lounge, {price}\n- **Vehicle**: {self.kind}\n\n"
            "Shall I go on with that? (yes or no)"
        )
        self.user_says("Yes, please do.")
        self.calls(
            *("change_booking", {"booking_id": self.booking, "crossing": crossing, "paid": price}),
            booking_id=self.booking,
            crossing=crossing,
            place="lounge",
            payment="card",
        )
        self.agent_says(
            f"It is done: {crossing} on {self.day}, in the lounge. Is there anything else?"
        )

    def ask_around(self) -> None:
        self.origin, self.destination = self.destination, self.origin
        self.user_says(
            f"And on the way back, from {self.origin} to {self.destination}? "
            "Nothing before ten in the morning, if that can be had."
        )
        self.find()

    def cancel(self) -> None:
        self.user_says(
            "My plans have changed. Can the other one be cancelled, and what is paid back?"
        )
        self.calls(
            *("get_booking", {"booking_id": self.booking, "place": "cabin", "cover": "storm"}),
            booking_id=self.booking,
        )
        self.agent_says("It has a cabin, so it can be cancelled. Shall I do that? (yes or no)")
        self.user_says("Yes, cancel it.")
        self.calls(
            *("cancel_booking", "cancelled"), booking_id=self.booking, reason="a change of plans"
        )
        self.agent_says("It is cancelled, and the money is back within a week.")


def conversation(number: int) -> list[Message]:
    """Make the whole conversation with this number, up to the traveller's last message."""
    desk = _Desk(number)
    draw = desk.draw
    wish = draw.choice(WISHES).format(
        a=desk.origin, b=desk.destination, day=desk.day, kind=desk.kind
    )
    desk.user_says(f"Hi! I would like to {wish}.")
    desk.agent_says("I can help with that. What is your user id, please?")
    desk.user_says(f"Sure, my user id is {desk.user}.")
    if number % 3 == 0:
        desk.agent_says(
            f"Thank you, {desk.first}. Please tell me a little more:\n\n1. Which place: deck, "
            "lounge or cabin?\n2. Who or what travels along?\n3. How would you like to pay?"
        )
        desk.user_says(f"1. Lounge\n2. Me, and {desk.kind}\n3. The gift card first, then my card")
    desk.calls("get_profile", desk.profile(), user_id=desk.user)
    desk.find()
    for _ in range(draw.randint(1, 5)):
        draw.choice((desk.change, desk.change, desk.ask_around, desk.cancel))()
    desk.user_says("No, that was all. Thank you!")
    return desk.said


def conversations(count: int) -> list[list[Message]]:
    return [conversation(number) for number in range(count)]

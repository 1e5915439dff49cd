#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Makes synthetic.json: prompts of which is known where the answer stands, from a fixed seed. Names, places and numbers are
# made up, so that no model knows an answer but from the passages. Groups:
#   one_fact_I_of_N      the fact in passage I, I from first to last
#   two_facts_A_B        two facts, in passages A and B, of which the answer is made
#   correction           a fact, and further on that it has changed: the later one counts
#   near_duplicates      one fact among passages that say the same of others with almost the same name
import argparse
import json
import os
import random

PASSAGES = 8
INSTRUCTIONS = "You are a helpful assistant. Answer the question from the passages, in a few words."

FIRST = "Alvin Berta Casimir Dorothea Edgar Felicity Gustav Helena Ivor Josephine Konrad Lavinia Magnus Nerissa Osbert Philippa".split()
LAST = "Ashdown Brackwater Carlow Dunmore Ellery Farrow Greaves Halloran Inskip Jessop Kettering Lorimer Marchbank Norcott Oakhurst Pemberly".split()
TOWNS = "Abberley Brightwater Coldharbour Dunsford Eastmere Fallowfield Greenholm Hartsby Ingleton Kingsmoor Lindhaven Marlowick Northgate Oldbury Pinecrest Queensferry".split()
COLOURS = "red blue green yellow white black purple orange".split()
ANIMALS = "horse dog cat goat parrot donkey rabbit sheep".split()

FILLER = [
    "In {season} the {animals} of the valley move to lower ground, where the {plants} grow thicker.",
    "Most {things} made of {material} last for decades if they are kept dry and out of the sun.",
    "The {dish} is cooked slowly over a low fire and served with {plants} and a little salt.",
    "Visitors are asked to leave their {things} at the entrance and to speak quietly in the {rooms}.",
    "Rain fell for {number} days, and the water in the {places} rose above the second step.",
    "A thick layer of {material} keeps the {rooms} cool in {season} and warm at night.",
    "The guide explained how {things} were once carried across the {places} by hand.",
    "Nobody remembers who planted the {plants} that now cover the old {places}.",
    "Each {season} the workshop repairs about {number} {things} and sells the rest at a low price.",
    "When the wind turns, the {animals} fall silent and the {places} look empty.",
    "The recipe calls for {number} spoons of flour, some {plants} and a good deal of patience.",
    "Long walls of {material} divide the fields, and {animals} graze between them.",
    "The {rooms} of the museum show {things} from before the age of steam.",
    "Children learn to mend {things} before they learn to read, as their parents did.",
    "After {number} years the {material} had turned grey, but it held the weight of the roof.",
    "Early in {season} the fog hangs over the {places} until the middle of the day.",
    "The {dish} tastes best on the day after it was made, with {plants} on top.",
    "Engineers measured the {places} {number} times and found nothing to worry about.",
    "Some {animals} live in the {rooms} under the roof and come out only after dark.",
    "The catalogue lists {number} kinds of {plants}, of which most are no longer grown.",
    "A cart loaded with {things} blocked the way to the {places} for most of the morning.",
    "The floor is laid with {material}, which is cleaned twice in {season}.",
    "Before the harvest the {plants} are tied up so that the {animals} cannot reach them.",
    "Letters about the {places} are kept in boxes of {material} in the {rooms} upstairs.",
]
SLOTS = {
    "season": "spring summer autumn winter".split(),
    "animals": "deer herons otters swallows beetles hares bats frogs".split(),
    "plants": "nettles herbs mosses beans willows onions ferns grapes".split(),
    "things": "baskets lamps tools ropes kettles boats wheels blankets".split(),
    "material": "oak slate clay iron wool copper straw granite".split(),
    "dish": "soup stew pie porridge bread dumpling".split(),
    "rooms": "halls cellars attics galleries kitchens corridors".split(),
    "places": "meadows quarries canals orchards cliffs marshes terraces harbours".split(),
    "number": "three five six nine eleven twelve twenty forty".split(),
}


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def name(self):
        return f"{self.random.choice(FIRST)} {self.random.choice(LAST)}"

    def filler(self, sentences):
        """Sentences of which none looks like an answer."""
        return [
            template.format(**{slot: self.random.choice(words) for slot, words in SLOTS.items()})
            for template in self.random.sample(FILLER, sentences)
        ]

    def passages(self):
        return [self.filler(8) for _ in range(PASSAGES)]

    @staticmethod
    def with_facts(passages, facts):
        """`facts`: sentence by passage. Each stands in the middle of its passage."""
        out = []
        for i, lines in enumerate(passages):
            out.append(" ".join(lines[:4] + ([facts[i]] if i in facts else []) + lines[4:]))
        return out

    def fact(self, name):
        """A sentence about the name, the question and the answer."""
        code = str(self.random.randint(1000, 9999))
        kinds = [
            (f"The secret code of {name} is {code}.", f"What is the secret code of {name}?", code),
            self.choice_fact(name, COLOURS, "The favourite colour of {} is {}.", "What is the favourite colour of {}?"),
            self.choice_fact(name, ANIMALS, "The only animal that {} owns is a {}.", "Which animal does {} own?"),
            self.choice_fact(name, TOWNS, "The summer house of {} stands in {}.", "In which town does the summer house of {} stand?"),
        ]
        return self.random.choice(kinds)

    def choice_fact(self, name, values, sentence, question):
        value = self.random.choice(values)
        return sentence.format(name, value), question.format(name), value

    def one_fact(self):
        """The same passages, question and fact, with the fact in each passage in turn."""
        sentence, question, answer = self.fact(self.name())
        passages = self.passages()
        for i in range(PASSAGES):
            yield f"one_fact_{i + 1}_of_{PASSAGES}", question, [answer], self.with_facts(passages, {i: sentence})

    def two_facts(self, a, b):
        name = self.name()
        town = self.random.choice(TOWNS)
        code = str(self.random.randint(1000, 9999))
        facts = {a: f"The lighthouse of {town} is kept by {name}.", b: f"The secret code of {name} is {code}."}
        question = f"What is the secret code of the keeper of the lighthouse of {town}?"
        return f"two_facts_{a + 1}_{b + 1}", question, [code], self.with_facts(self.passages(), facts)

    def correction(self, a, b):
        name = self.name()
        old, new = self.random.sample(TOWNS, 2)
        facts = {
            a: f"The office of {name} is in {old}.",
            b: f"Correction: the office of {name} is no longer in {old}; it has moved to {new}.",
        }
        question = f"In which town is the office of {name} now?"
        return "correction", question, [new], self.with_facts(self.passages(), facts)

    def near_duplicates(self, position):
        firsts = self.random.sample(FIRST, PASSAGES)
        last = self.random.choice(LAST)
        codes = self.random.sample(range(1000, 9999), PASSAGES)
        facts = {}
        for i in range(PASSAGES):
            facts[i] = f"The secret code of {firsts[i]} {last} is {codes[i]}."
        question = f"What is the secret code of {firsts[position]} {last}?"
        return "near_duplicates", question, [str(codes[position])], self.with_facts(self.passages(), facts)


def main():
    parser = argparse.ArgumentParser(description="Makes synthetic prompts.")
    parser.add_argument("--seed", type=int, default=20240527)
    parser.add_argument("--each", type=int, default=20, help="prompts of a group")
    parser.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "synthetic.json"))
    options = parser.parse_args()
    maker = Maker(options.seed)
    made = []
    for _ in range(options.each):
        made += list(maker.one_fact())
        made += [maker.two_facts(0, PASSAGES - 1), maker.two_facts(PASSAGES - 1, 0), maker.two_facts(2, 3)]
        made.append(maker.correction(1, PASSAGES - 2))
        made.append(maker.near_duplicates(maker.random.randrange(PASSAGES)))
    items = [
        {"id": i, "group": group, "question": question, "answers": answers, "passages": passages}
        for i, (group, question, answers, passages) in enumerate(made, 1)
    ]
    document = {
        "source": f"made up by bench/prompts/synthetic.py --seed {options.seed} --each {options.each}",
        "instructions": INSTRUCTIONS,
        "items": items,
    }
    with open(options.out, "w", encoding="utf-8", newline="\n") as file:
        json.dump(document, file, ensure_ascii=False, indent=1)
        file.write("\n")
    print(options.out, len(items), "prompts")


if __name__ == "__main__":
    main()

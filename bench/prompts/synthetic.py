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
TRADES = "baker carpenter clockmaker gardener glassblower miller potter saddler tailor weaver".split()
COLOURS = "red blue green yellow white black purple orange".split()
ANIMALS = "horse dog cat goat parrot donkey rabbit sheep".split()
INSTRUMENTS = "violin flute trumpet piano guitar harp drum cello".split()

FILLER = [
    "{name} was born in {town} and moved to {other} at the age of {age}.",
    "The market of {town} is held every {day} and draws visitors from {other}.",
    "{name} worked as a {trade} for {age} years before turning to writing letters.",
    "The road from {town} to {other} was paved in {year} and widened {age} years later.",
    "In {year} a storm damaged the roof of the town hall of {town}.",
    "{name} kept a {colour} notebook in which every visitor was listed.",
    "The bridge of {town} was designed by {name} and opened in {year}.",
    "The library of {town} lends more than {year} books a month.",
    "{name} plays the {instrument} in the orchestra of {town} on {day}s.",
    "The old mill near {other} belongs to the family of {name}.",
    "The school of {town} was founded in {year} by a {trade} from {other}.",
    "Every {day} the bells of {town} ring {age} times.",
]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def names(self, count):
        firsts = self.random.sample(FIRST, count)
        lasts = self.random.sample(LAST, count)
        return [f"{first} {last}" for first, last in zip(firsts, lasts)]

    def filler(self, names, sentences):
        """Sentences about others, of which none answers a question."""
        out = []
        for template in self.random.sample(FILLER, sentences):
            town, other = self.random.sample(TOWNS, 2)
            out.append(
                template.format(
                    name=self.random.choice(names),
                    town=town,
                    other=other,
                    trade=self.random.choice(TRADES),
                    colour=self.random.choice(COLOURS),
                    instrument=self.random.choice(INSTRUMENTS),
                    day=self.random.choice(DAYS),
                    year=self.random.randint(1801, 1990),
                    age=self.random.randint(11, 60),
                )
            )
        return out

    def passages(self, names):
        return [self.filler(names, 8) for _ in range(PASSAGES)]

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
        names = self.names(9)
        sentence, question, answer = self.fact(names[0])
        passages = self.passages(names[1:])
        for i in range(PASSAGES):
            yield f"one_fact_{i + 1}_of_{PASSAGES}", question, [answer], self.with_facts(passages, {i: sentence})

    def two_facts(self, a, b):
        names = self.names(9)
        town = self.random.choice(TOWNS)
        code = str(self.random.randint(1000, 9999))
        facts = {a: f"The lighthouse of {town} is kept by {names[0]}.", b: f"The secret code of {names[0]} is {code}."}
        question = f"What is the secret code of the keeper of the lighthouse of {town}?"
        return f"two_facts_{a + 1}_{b + 1}", question, [code], self.with_facts(self.passages(names[1:]), facts)

    def correction(self, a, b):
        names = self.names(9)
        old, new = self.random.sample(TOWNS, 2)
        facts = {
            a: f"The office of {names[0]} is in {old}.",
            b: f"Correction: the office of {names[0]} is no longer in {old}; it has moved to {new}.",
        }
        question = f"In which town is the office of {names[0]} now?"
        return "correction", question, [new], self.with_facts(self.passages(names[1:]), facts)

    def near_duplicates(self, position):
        names = self.names(9)
        last = names[0].split()[1]
        firsts = [names[0].split()[0]] + [name for name in FIRST if name != names[0].split()[0]]
        codes = self.random.sample(range(1000, 9999), PASSAGES)
        facts = {}
        for i in range(PASSAGES):
            who = firsts[0] if i == position else firsts[1 + i]
            facts[i] = f"The secret code of {who} {last} is {codes[i]}."
        question = f"What is the secret code of {names[0]}?"
        return "near_duplicates", question, [str(codes[position])], self.with_facts(self.passages(names[1:]), facts)


def main():
    parser = argparse.ArgumentParser(description="Makes synthetic prompts.")
    parser.add_argument("--seed", type=int, default=20240527)
    parser.add_argument("--each", type=int, default=4, help="prompts of a group")
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

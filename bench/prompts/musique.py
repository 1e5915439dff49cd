#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Makes musique_choosing.json and musique_confirming.json of musique_75.json: the first 37 questions and the other 38, a
# split that was fixed before anything was measured on the second half. The texts of a question overlap: sentences that
# were there before are left out, the others packed into passages, and eight passages kept.
import argparse
import json
import os
import re

WORDS = 125  # of a passage, at most
PASSAGES = 8  # a question
CHOOSING = 37  # questions, from the first on
INSTRUCTIONS = "You are a helpful assistant. Answer the question from the passages, in a few words."


def sentences(text):
    return [part.strip() for part in re.split(r"(?<=[.;?!]) ", text) if part.strip()]


def packed(texts):
    """Passages of at most WORDS words, of the sentences in their order, each once; cut ends of a window are dropped."""
    seen = set()
    passages = []
    words = []
    for text in texts:
        parts = sentences(text)
        for part in parts[1:-1] if len(parts) > 2 else parts:
            if part in seen or "##" in part or len(part.split()) > WORDS:
                continue
            seen.add(part)
            if len(words) + len(part.split()) > WORDS:
                passages.append(" ".join(words))
                words = []
            words += part.split()
    if len(words) > WORDS // 2:
        passages.append(" ".join(words))
    return passages


def chosen(passages, question, answers):
    """The PASSAGES that have most of the question's words and an answer, in their order."""
    wanted = {word for word in re.findall(r"\w+", question.lower()) if len(word) > 3}

    def merit(index):
        words = set(re.findall(r"\w+", passages[index]))
        answer = any(answer.lower() in passages[index] for answer in answers)
        return (-10 * answer - len(words & wanted), index)

    return [passages[i] for i in sorted(sorted(range(len(passages)), key=merit)[:PASSAGES])]


def main():
    parser = argparse.ArgumentParser(description="Makes prompt files of the 75 questions of MuSiQue.")
    parser.add_argument("source", help="musique_75.json")
    parser.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)), help="folder")
    options = parser.parse_args()
    with open(options.source, encoding="utf-8") as file:
        questions = json.load(file)
    items = []
    for number, entry in enumerate(questions, 1):
        passages = packed(context["text"] for context in entry["ctxs"])
        passages = chosen(passages, entry["question"], entry["answers"])
        items.append({"id": number, "question": entry["question"], "answers": entry["answers"], "passages": passages})
    for name, part in (("choosing", items[:CHOOSING]), ("confirming", items[CHOOSING:])):
        ids = [item["id"] for item in part]
        source = f"MuSiQue (multi-hop questions), items {ids[0]} to {ids[-1]} as published with the CacheBlend paper's code; made by bench/prompts/musique.py"
        document = {"source": source, "licence": "CC BY 4.0", "instructions": INSTRUCTIONS, "items": part}
        path = os.path.join(options.out, f"musique_{name}.json")
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            json.dump(document, file, ensure_ascii=False, indent=1)
            file.write("\n")
        print(path, len(part), "questions", sum(len(item["passages"]) for item in part), "passages")


if __name__ == "__main__":
    main()

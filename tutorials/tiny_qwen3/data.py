"""What the embedded model has learned: questions whose answers can be checked, and stories.

Every task is a function `task(rng) -> (question, answer)`. The answer is a pure function of the
question (except for stories), so a wrong one is a fact and not an opinion: `evaluate.py` asks fresh
questions and counts. How it was trained: nanovllm/tiny_qwen3/README.md.
"""

NAMES = """
Ada Adam Aisha Alan Albert Alice Alma Amir Amy Ana Andrea Anna Anton Arthur Astrid Ava Axel Bella Ben
Bernd Bianca Boris Brian Bruno Carla Carlos Cecilia Chloe Clara Claude Colin Cora Daniel Daria David
Diana Diego Dora Edgar Edith Elena Eli Elias Ella Elsa Emil Emma Enzo Eric Erika Esther Eva Fabian
Fatima Felix Finn Fiona Flora Frank Frida Fritz Gabriel Gemma George Gina Grace Greta Gustav Hannah
Harry Heidi Helen Henry Hilda Hugo Ian Ida Igor Ines Ingrid Irene Iris Isaac Ivan Ivy Jack Jakob James
Jana Jasmin Jean Joel Johan Jonas José Judith Julia Jürgen Karen Karl Katja Kevin Kim Kira Klaus Lara
Laura Lea Leo Leon Lena Levi Lily Linda Lisa Liu Louis Lucas Lucy Luis Luna Maja Marco Maria Mark
Marta Martin Mary Max Maya Mia Milo Mina Miriam Mona Nadia Nell Nina Noah Nora Odin Olga Oliver Omar
Oscar Otto Pablo Pam Paul Pedro Petra Phil Pia Quinn Rafael Ralf Ravi Rita Robert Rosa Ruby Ruth Sam
Sara Sasha Sean Silvia Simon Sofia Sonja Stella Sven Søren Tara Theo Thomas Tim Tina Tobias Tom Uma
Ursula Vera Victor Viola Walter Wanda Wendy Will Xaver Yara Yuki Yusuf Zara Zoë
""".split()
WORDS = """
apple river stone cloud garden window bread music paper yellow summer winter bridge candle forest
silver mountain pencil orange dragon castle kitchen letter market ocean planet rabbit school table
train valley water flower island bottle button circle dinner engine finger guitar hammer jacket
ladder mirror needle pocket rocket spoon tiger violin wagon basket cheese desert lemon tower
""".split()


# --- tasks with one right answer -----------------------------------------------------------------


def number(rng, digits=(1, 2, 2, 3, 3, 3, 3)):
    """Few digits are easy and rare, three digits are hard and common."""
    n = rng.choice(digits)
    return rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n)


def join(numbers):
    return ", ".join(map(str, numbers))


def add(rng):
    a, b = number(rng), number(rng)
    ask = rng.choice(
        ["what is {} + {}?", "{} + {} = ?", "{} + {}", "add {} and {}", "how much is {} plus {}?"]
    )
    return ask.format(a, b), f"{a} + {b} = {a + b}"


def subtract(rng):
    a, b = number(rng), number(rng)
    if a < b and rng.random() < 0.7:  # negative results stay rare
        a, b = b, a
    ask = rng.choice(["what is {} - {}?", "{} - {} = ?", "{} - {}", "how much is {} minus {}?"])
    return ask.format(a, b), f"{a} - {b} = {a - b}"


def count(rng):
    step = rng.choice([1, 1, 1, 2, 3, 5, 10])
    start, length = rng.randrange(0, 90), rng.randint(2, 20)
    end = start + step * (length - 1)
    if step == 1 and rng.random() < 0.3:
        return f"count down from {end} to {start}", join(range(end, start - 1, -1))
    question = f"count from {start} to {end}" + (f" in steps of {step}" if step > 1 else "")
    return question, join(range(start, end + 1, step))


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def primes(rng):
    kind = rng.random()
    if kind < 0.3:
        n = rng.randrange(2, 200)
        factor = next((d for d in range(2, n) if n % d == 0), None)
        answer = f"No, {n} = {factor} x {n // factor}." if factor else f"Yes, {n} is prime."
        return rng.choice(["is {} a prime number?", "is {} prime?"]).format(n), answer
    low, high = 0, 100 if rng.random() < 0.2 else rng.randrange(5, 151)
    if kind < 0.6:
        low = rng.randrange(0, 130)
        high = low + rng.randrange(10, 50)
    found = join(n for n in range(low, high + 1) if is_prime(n)) or "There are none."
    if low:
        return f"list all prime numbers between {low} and {high}", found
    return rng.choice(["list all prime numbers within {}", "list all primes up to {}"]).format(
        high
    ), found


def sort(rng):
    top = rng.choice([30, 100, 100])
    numbers = rng.sample(range(top), rng.randint(2, 8))
    if rng.random() < 0.25:
        return f"sort in descending order: {join(numbers)}", join(sorted(numbers, reverse=True))
    ask = rng.choice(["sort {}", "sort these numbers: {}", "put in order: {}"])
    return ask.format(join(numbers)), join(sorted(numbers))


def reverse(rng):
    words = rng.sample(WORDS, rng.randint(2, 6))
    ask = rng.choice(["reverse the words: {}", "say these words backwards: {}", "reverse: {}"])
    return ask.format(" ".join(words)), " ".join(reversed(words))


def phone_book_turns(rng, entries, turns):
    """A book and a question about it, then more questions about the same book."""
    names = rng.sample(NAMES, entries)
    numbers = [f"{rng.randrange(10000):04d}" for _ in names]
    text = "phone book:\n" + "".join(f"{name} {phone}\n" for name, phone in zip(names, numbers))
    for i in rng.choices(range(entries), k=turns):
        ask = rng.choice(
            ["what is the number of {}?", "what is {}'s number?", "how can I reach {}?"]
        )
        yield text + ask.format(names[i]), f"{names[i]} {numbers[i]}"
        text = ""


def phone_book(rng, entries=None):
    """A look-up in a long context: an engine that mixes up its KV blocks cannot answer this."""
    return next(phone_book_turns(rng, entries or rng.randint(2, 16), turns=1))


# --- tasks for sampling --------------------------------------------------------------------------


ANIMALS = "fox rabbit bear owl mouse cat dog frog hedgehog turtle squirrel duck horse crow".split()
TRAITS = "small curious brave shy clever kind lazy quiet cheerful stubborn young old".split()
HEROES = [(n, "he", "his", "him") for n in ("Milo", "Otto", "Finn", "Bruno", "Oscar", "Theo")] + [
    (n, "she", "her", "her") for n in ("Luna", "Nora", "Ida", "Ruby", "Stella", "Maya")
]
PLACES = [
    "at the edge of a deep forest",
    "in a village by the sea",
    "on a green hill",
    "in an old garden",
    "on a small island",
    "beside a slow river",
]
THINGS = [
    "golden key",
    "blue scarf",
    "little bell",
    "red kite",
    "silver spoon",
    "paper map",
    "warm lantern",
]
HIDES = [
    "under a pile of leaves",
    "in a hollow tree",
    "behind the old mill",
    "between two stones",
    "on the roof of the barn",
]
PLOTS = [
    [  # something lost
        [
            "One morning {He} saw that {his} {thing} was gone.",
            "One windy day {He} lost {his} {thing}.",
        ],
        [
            "{He} looked in the house, on the path and by the well, but it was not there.",
            "{He} searched all day and found nothing but dust.",
        ],
        [
            'Then {He} met a {trait2} {friend}. "Do not be sad," said the {friend}. "Two pairs of eyes see more than one."',
            '"Why do you cry?" asked a {trait2} {friend}. "I have lost my {thing}," said {name}. "Then let us look together," said the {friend}.',
        ],
        [
            "Together they looked until the sun went down, and there it was, {hide}.",
            "They searched {hide}, and there was the {thing}, as good as new.",
        ],
        [
            "{name} thanked the {friend}, and from that day on they were friends.",
            "{name} laughed with joy and gave the {friend} half of {his} bread.",
        ],
    ],
    [  # a journey
        [
            "Every night {He} looked at the moon and wanted to know how far away it was.",
            "More than anything else {He} wanted to see what was behind the mountains.",
        ],
        [
            "So one day {He} packed some bread and a {thing}, and left.",
            "One morning {He} took {his} {thing} and walked away before anybody was awake.",
        ],
        [
            "The road was long, and it rained for three days.",
            "The way was steep, and at night it was very cold.",
        ],
        [
            'On the fourth day a {trait2} {friend} sat by the road. "Where are you going?" asked the {friend}. "To the end of the world," said {name}. "You have passed it already," said the {friend} and smiled.',
            'At the top lived a {trait2} {friend}. "I came to see the world," said {name}. "Then turn around," said the {friend}, and there it was, wide and bright.',
        ],
        [
            "{name} went home again and told the story to everybody who wanted to hear it.",
            "{name} came home tired and happy, and never forgot what {he} had seen.",
        ],
    ],
    [  # a storm
        [
            "One night a great storm came and broke the bridge.",
            "In autumn a storm took the roof off {his} house.",
        ],
        [
            '"I can mend it alone," said {name}, but the wood was too heavy for {him}.',
            "{He} tried to mend it, but every time it fell down again.",
        ],
        [
            'A {trait2} {friend} watched for a while and then said, "I am not strong, but I know how to tie a knot."',
            'Then a {trait2} {friend} came by with a rope. "You hold and I pull," said the {friend}.',
        ],
        [
            "They worked from morning to night, and on the third day it was done.",
            "They held and pulled and sang, and soon the work was done.",
        ],
        [
            "When the next storm came, everything stood firm.",
            'That evening they sat by the fire, and {name} said, "Next time I will ask you first."',
        ],
    ],
    [  # afraid of the dark
        [
            "{He} was not afraid of wolves or thunder, but {he} was afraid of the dark.",
            "{He} had one secret: {he} could not sleep when it was dark.",
        ],
        [
            "One evening {his} {thing} fell into the water, and {he} had to go home without a light.",
            "One evening {he} stayed out too long, and the night came.",
        ],
        [
            'Something moved in the grass. "Who is there?" asked {name}. "Only me," said a {trait2} {friend}. "I am afraid too."',
            'Two eyes looked at {him}. It was only a {trait2} {friend}. "Look up," said the {friend}, "then it is not dark at all."',
        ],
        [
            "So they walked side by side and counted the stars, and the way was short.",
            "They talked all the way, and before they knew it they were home.",
        ],
        [
            "Since then {name} likes the night, because it is full of friends.",
            "That night {name} slept well for the first time.",
        ],
    ],
]


def tell(rng, animal=None, trait=None):
    animal, trait = animal or rng.choice(ANIMALS), trait or rng.choice(TRAITS)
    name, he, his, him = rng.choice(HEROES)
    slots = dict(
        name=name, he=he, his=his, him=him, He="{He}", animal=animal, trait=trait, place=rng.choice(PLACES),
        friend=rng.choice([a for a in ANIMALS if a != animal]), trait2=rng.choice([t for t in TRAITS if t != trait]),
        thing=rng.choice(THINGS), hide=rng.choice(HIDES),
    )  # fmt: skip
    opening = rng.choice(
        [
            "Once upon a time there was a {trait} {animal} named {name} who lived {place}.",
            "There once was a {trait} {animal} called {name}. {He} lived {place}.",
            "{place} lived a {trait} {animal}, and the name of this {animal} was {name}.",
        ]
    )
    story = []
    for part in [[opening], *rng.choice(PLOTS)]:
        text = rng.choice(part).format(**slots)
        pronoun = he.capitalize() if text.startswith("{He}") or ". {He}" in text else he
        text = text.replace("{He}", pronoun)
        story.append(text[0].upper() + text[1:])
    return " ".join(story).replace("a old ", "an old ").replace("A old ", "An old ")


def story(rng):
    animal, trait = rng.choice(ANIMALS), rng.choice(TRAITS)
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(["tell me a story", "write a short story", "tell a story"]), tell(rng)
    ask = rng.choice(
        ["tell me a story about a {}", "write a short story about a {}", "tell a story about a {}"]
    )
    if kind < 0.65:
        return ask.format(animal), tell(rng, animal)
    return ask.format(f"{trait} {animal}"), tell(rng, animal, trait)


# --- chats ---------------------------------------------------------------------------------------

CHECKED = {t.__name__: t for t in (add, subtract, count, primes, sort, reverse, phone_book)}


def as_typed(rng, question):
    """A question as different people would type it."""
    if rng.random() < 0.5:
        question = question[0].upper() + question[1:]
    if question[-1].isalpha() and rng.random() < 0.2:
        question += "."
    return question

"""The closed vocabulary that the generated texts are made of."""

from __future__ import annotations

import random

__all__ = [
    "ADJECTIVES",
    "ANIMALS",
    "BOYS",
    "COLOURS",
    "COMMON",
    "FOODS",
    "GIRLS",
    "JOBS",
    "LOCKED",
    "NAMES",
    "OBJECTS",
    "PLACES",
    "TOWNS",
    "made_up",
]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS = _words(
    "Anna Mia Lily Emma Sara Nora Ella Rosa Ivy Clara Maya Zoe Lucy Alice Jane Ruth Vera Tina Kate Olga Hana Iris Dora Amy"
)
BOYS = _words(
    "Tom Ben Max Sam Leo Jack Paul Omar Ravi Hugo Finn Carl Adam Noah Luke Ivan Oscar Peter Simon Victor Felix Dan Tim Bob"
)
NAMES = GIRLS + BOYS
COLOURS = _words("red blue green yellow black white brown pink purple orange grey silver golden")
OBJECTS = _words(
    "key lamp book hat coin ring cup ball map rope bell clock spoon knife mirror drum flute kite shoe coat scarf "
    "basket bottle candle brush comb stone shell feather pencil letter picture blanket pillow hammer bucket ladder "
    "umbrella torch whistle needle plate bowl watch glove button"
)
PLACES = _words(
    "kitchen garden barn attic cellar library hall bedroom office garage tower stable shop school bakery church "
    "museum station cave forest harbour market temple cabin workshop tent"
)
LOCKED = _words("door gate box chest window cupboard drawer safe")
ANIMALS = _words("dog cat horse cow goat sheep rabbit fox owl duck hen mouse pig donkey parrot turtle")
FOODS = _words("apples pears plums cherries grapes lemons carrots beans nuts eggs cakes cookies onions potatoes")
JOBS = _words("baker doctor teacher farmer sailor painter driver cook singer writer tailor gardener pilot nurse judge miner")
TOWNS = _words("Oakham Redford Millbrook Stonehill Westport Fairview Greendale Ashby Newton Brookfield Lakeside Marlow")
ADJECTIVES = _words("small big old new quiet happy clever kind brave little pretty strange heavy shiny warm soft")
# Seen only in copying and lists, so that other words than those above are known to the model as something to repeat.
COMMON = _words(
    "able about above across act add afraid after again age ago agree air all almost along already also always among "
    "and answer any appear area arm around arrive art ask baby back bad bag bank base bath beach bean beat because "
    "become been before begin behind believe below best better between beyond bird birth bit blood blow board boat "
    "body bone both bottom boy branch bread break breath bridge bright bring brother build burn bus busy but buy cake "
    "call calm camp can car card care carry case catch cause centre chair chance change cheap check child choose "
    "circle city class clean clear climb close cloth cloud coast cold collect come common computer contain continue "
    "control copy corn corner cost could count country course cover cross crowd cry cut dance danger dark daughter "
    "day dead deal dear death decide deep desert desk did different difficult dinner direction dirty discover do "
    "double doubt down draw dream dress drink drive drop dry dust duty each ear early earth east easy eat edge eight "
    "either electric eleven else empty end engine enjoy enough enter equal even evening event ever every example "
    "except expect explain eye face fact fail fair fall family famous far fast father fear feed feel few field "
    "fifteen fifth fight figure fill film final find fine finger finish fire first fish five fix flag flat floor "
    "flower fly follow food foot for force forget form forward four free fresh friend from front fruit full fun game "
    "general gentle get girl give glad glass go gold good grass great ground group grow guess guide hair half hand "
    "happen hard hate head health hear heart heat help her here hide high hill his hold hole holiday home hope hot "
    "hour house how huge human hundred hunt hurry hurt ice idea if important inside interest into iron island job "
    "join joke journey jump just keep kill king kiss kitchen knee know land language large late laugh law lead learn "
    "leave left leg lesson let level lie life lift light like line lip list listen live local long look lose lot loud "
    "love low luck lunch machine magic main make man many mark master matter may meal mean measure meat meet member "
    "memory metal method middle might mile milk million mind minute miss model modern moment money month moon more "
    "morning most mother mountain mouth move much music must name nation nature near neck need nest never news next "
    "nice night nine noise none north nose note nothing notice number ocean off offer often oil once one only open "
    "opposite order other our out outside over own page pain pair paper parent park part party pass past path pay "
    "peace people perhaps person phone piece pink place plain plan plant play please pocket point police poor "
    "possible pound power practice present press price prince print problem promise proper pull push queen question "
    "quick quite race radio rain raise reach read ready real reason record remember repeat reply report rest result "
    "return rice rich ride right rise river road rock roll roof room root round rule run sad sail salt same sand save "
    "say science sea seat second secret see seed seem sell send sentence serve set seven several shade shake shape "
    "share sharp she shelf ship shirt short should shoulder shout show shut sick side sign silence simple since sing "
    "sister sit six size skin sky sleep slip slow smell smile smoke snake snow some son song soon sorry sound soup "
    "south space speak special speed spell spend spring square stage stand star start state stay steal steam steel "
    "step stick still stop storm story strange stream street strong study such sudden sugar summer sun supper sure "
    "surprise sweet swim system table tail take talk tall taste tax tea team tell ten test than thank that their them "
    "then there these they thick thin thing think third thirty this those though thousand three through throw ticket "
    "time tired together tomorrow tonight too tooth top total touch toward town toy trade train travel tree trip "
    "trouble true trust try turn twelve twenty two type uncle under until use useful usual valley very village visit "
    "voice wait wake walk wall want war wash waste water wave way wear weather week weight well west wet what wheel "
    "when while who whole why wide wife wild will win wind wine winter wise wish with without woman wonder wood word "
    "work world worry worth would write wrong yard year yes yesterday yet young"
)
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def made_up(rng: random.Random) -> str:
    """A word of two or three syllables that is none of the above, in lower case."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3))) + rng.choice(
        ["", "", "n", "r", "s"]
    )

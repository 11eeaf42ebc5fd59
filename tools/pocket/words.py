"""The words of Pocket's questions, and the rule that holds some of them out of training.

A word's spelling decides whether it is held out, so training and exam need no common list. One word
in eight is held out, made-up words included."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random


def held_out(word: str) -> bool:
    return zlib.crc32(word.lower().encode()) % 8 == 0


THINGS = """
account address airport album alarm anchor angle answer apartment apple apron archive armchair
arrow article artist atlas attic author badge baker balcony ballot bank banner barge barn barrel
basement basin basket battery beach beacon bell belt bench berry bicycle bill bin blanket block
board boat boiler bolt book border bottle boundary bowl box branch bread bridge broom brush bucket
budget builder building bundle bus button cabin cabinet cable cafe camera canal candle canteen
captain car card cargo carpet carriage case castle cat ceiling cellar chair channel chapel charger
chart chef chimney choir cinema circle clerk clinic clock closet cloth coach coast coat code coin
collar colour column comet compass concert contact contract cook copper corner corridor cottage
counter country courier course court cousin crane crate creek crew crossing crown cup curtain
cushion customer dam date daughter deadline deck dentist department depot desk diary dinner
director dish dock doctor dog door drawer dress drill driver drum dusk editor elevator email
employee engine entrance envelope event exit factory fair farm farmer fee fence ferry festival
field file filter flag flat flight floor flour flower folder forest fork fountain frame freezer
friend frost fuel garage garden gardener gate gear gift glass glove goal grain gravel grocer group
guard guest guide hall hammer handle harbour harvest hat hedge helmet hero hill hinge horse
hospital hotel hour house inspector island jacket jar jeweller judge juice jug keeper kettle key
kitchen kite knife label ladder lake lamp lane lantern laptop laundry lawn lawyer leader leaf
ledger lemon lesson letter lever library licence lift light lighthouse line list locker lodge log
lunch machine magazine manager manual map marina market master mayor meadow meal medal meeting
melody member memory menu merchant message meter mill mine miner mirror model mortar motor
mountain mouse museum nail needle neighbour nest net newspaper notebook number nurse oak oar
office officer oil orchard orchestra order oven owner packet paddle page paint painter palace pan
panel paper parcel park parking partner passage password patient pattern paver pebble pen pencil
pepper phone photo piano pier pilot pin pipe pitch plan planet plant plate platform player plaza
plumber pocket poem policy pond pool port porter post postcode pot potter price printer prize
project pump purse queue quay rack radio rail ramp receipt recipe record reef region relay rent
report reserve restaurant ribbon ring river road robot roof room rope route rug ruler saddle sail
sailor salt sauce saw scale scarf schedule school screen screw seal seat secretary seed sensor
server shed sheet shelf shell ship shirt shoe shop shower shuttle sign signal sister size sketch
slope soap sofa song soup spade speaker spoon spot spring square stable staff stage stair stamp
station statue steam step stone stool storage store storm stove street string studio suit summit
supplier switch table tailor tank tap target task taxi teacher team teller temple tenant tent
terminal theatre ticket tide tile timer tool torch tower town toy track trader trail train tray
treasurer tree trolley truck tunnel turbine umbrella uncle uniform valley valve van vault vehicle
vendor vessel village visitor voyage wagon waiter wall wallet warden warehouse watch water weaver
well wharf wheel whistle window winter wire witness workshop writer yard zone
""".split()

QUALITIES = """
amber ancient annual autumn back backup big black blue brave bright broad bronze brown calm
central chief clean clear coastal cold common cool crimson crisp daily dark deep deputy double dry
dusty early east eastern empty evening fast favourite final first flat fresh front gentle giant
gold golden grand green grey half happy hard heavy hidden high hollow hot inner iron ivory junior
large last late left little local lone long loud low lower lucky main marble middle morning narrow
national new night noble north northern odd old open orange outer oval pale past plain polar
private proud public purple quick quiet rapid rare red regional right rough round royal rusty
second secret senior shallow sharp short silent silver simple single slow small smooth soft solar
south southern spare square steady steep stone strong summer sunny tall tiny upper vacant violet
warm weekly west western wet white wide wild winter wooden yellow young
""".split()

PEOPLE = """
Ada Adam Agnes Aisha Alan Alma Amara Amir Andre Anika Anna Anton Arthur Astrid Aya Basil Beatrice
Ben Bianca Boris Bruno Camila Carl Carmen Cecilia Chen Chloe Clara Cyrus Dana Daniel Daria David
Delia Diego Dina Edith Eduardo Elena Elias Elif Emil Emma Enzo Erik Esther Eva Farid Fatima Felix
Fiona Flora Frida Gabriel Georg Gina Grace Greta Hana Hans Harriet Hassan Helen Henry Hugo Ida
Igor Ines Ingrid Irene Isaac Ivan Jakob James Jana Jasmin Joan Johan Jonas Jorge Julia Kai Karim
Karin Kenji Kofi Lara Laura Lea Leo Leila Lena Liam Lin Lola Louis Lucia Luis Magda Malik Marco
Maria Marta Mateo Maya Mei Mila Mina Miriam Mona Nadia Naomi Nils Nina Noah Nora Olga Oliver Omar
Oscar Otto Pablo Paula Pavel Petra Priya Rafael Raj Rana Rita Robert Rosa Ruben Ruth Sam Samira
Sara Selma Simon Sofia Sonja Stefan Sven Tara Theo Thomas Tilda Tomas Ulla Uma Vera Viktor Wanda
Wei Willem Yara Yusuf Zara Zoe
""".split()

PLACES = """
Accra Aleppo Amman Ankara Antwerp Athens Austin Bamako Basel Beirut Belfast Bergen Berlin Bilbao
Bogota Bologna Boston Bremen Brno Brussels Cairo Calgary Cardiff Chicago Cologne Cork Cusco Dakar
Delhi Denver Dhaka Dresden Dublin Durban Essen Fez Florence Geneva Genoa Ghent Glasgow Graz
Hamburg Hanoi Havana Helsinki Hobart Istanbul Jakarta Kabul Kampala Karachi Kazan Kigali Krakow
Kyoto Lagos Leeds Leipzig Lille Lima Lisbon London Luanda Lucerne Lyon Madrid Malaga Malmo Manila
Milan Mombasa Montreal Munich Nairobi Nantes Naples Nice Odense Oporto Osaka Oslo Ottawa Padua
Palermo Paris Perth Pisa Porto Prague Quito Rabat Reims Riga Rome Rotterdam Salzburg Santiago
Seattle Seoul Seville Sofia Split Tallinn Tampere Tartu Tokyo Toledo Toronto Trieste Tripoli
Tromso Tunis Turin Utrecht Valencia Venice Verona Vienna Vilnius Warsaw York Zagreb Zurich
""".split()

ACTIONS = """
add book cancel check close copy count create delete fetch find fix get list load lock make
measure move open order pay play print query read rename reserve reset run save scan search send
set show sort start stop store switch track turn update
""".split()

GETTING = "get find check show read list search query fetch".split()
"""Actions of tools that answer a question. Training shows all of them."""

MATTERS = """
alarm balance booking calendar contact course currency distance door event exchange factor file
flight forecast height humidity invoice lamp level light location lyrics mail meeting message news
note order parcel photo playlist population pressure price profile rate recipe record report
reservation room route schedule score sensor shipment signal speed status stock task temperature
ticket tide time timer traffic train translation volume weather width
""".split()

FIELDS = """
amount area city code colour country day destination duration email hour id key language level
limit location mode month name number origin owner person place port priority product quantity
reference region room size station street subject table target title topic town unit user width
year
""".split()

EVERYDAY = """
able about above accept across act afraid after again against agree almost alone along already
always among angry another any apart appear area around arrive aside ask asleep attack aware away
baby bad balance because become before begin behind believe belong below beside better between
beyond bird bite blood blow body bone both bottom brain break breath bring brother burn busy call
care carry catch cause chance change charge cheap child choice choose city claim class climb cloud
collect come comfort company complete consider contain continue control corn cost cover create cry
cure cut damage danger dare deal death decide defend deliver demand depend describe desert desire
detail develop die differ difficult direct discover distant divide doubt down dream drink drop
during duty each ear earn earth ease eat edge effect effort egg either else end enemy enjoy enough
enter equal escape even ever every exact example except excuse exist expect explain express eye
face fact fail faith fall false fame family far fear feed feel fight fill find fine finger fire
firm fish fit fly follow food foot force foreign forget forgive form fortune forward free frequent
full fun future gather general girl give glad go good grass great grow guess habit hair hand hang
happen hate have head heal hear heart heat help hide hit hold hole home honest hope human hunger
hunt hurry hurt ice idea imagine important improve inch include increase indeed inform inside
instead interest invite itself join joke joy jump just justice keep kill kind king kiss knee knock
know lack land language laugh law lay lazy lead lean learn leave leg lend less let liberty lie
life lip listen live load lose loss lot love luck man manner many mark marry matter mean measure
meat medicine mention mercy metal mind minute miss mistake mix modern moment money month moon
moral more mother mouth move much murder music must name nation nature near neat necessary neck
need neither nerve never next nice none noise nose nothing notice now obey object ocean offer
often once only opinion opposite other ought ounce out over pain pair part party pass patience
pause pay peace people perfect perhaps permit person pick picture piece pity place play please
pleasure plenty point poison polite poor possible pour power praise pray prefer prepare present
press pretend prevent print prison probable produce profit promise proof protect prove provide
pull punish pure push put quarrel quarter queen question quite race rain raise rate rather reach
read ready real reason receive reduce refuse regret relation religion remain remark remember
remove repair repeat reply request rescue respect rest result return reward rice rich ride rise
risk roll root rot row rub rude ruin rule run rush sad safe sale same sand satisfy save say
scatter science sea search season see seem seize self sell send sense separate serious serve set
settle several severe shade shadow shake shame shape share shine shock shoot shore shout show shut
sick side sight silk sing sink sit skill skin sky sleep smell smile smoke snow social soil soldier
solid some son soon sore sorry sort soul sound space speak speech speed spend spirit spite spoil
spread stand star start state stay steal steer stick stiff still stomach stop story strange
stretch strike struggle study subject succeed such sudden suffer sugar sun supply support suppose
sure surprise sweet swim sword sympathy system take talk taste tax teach tear tell temper tend
terrible test thank then thick thief thin thing think thirst thorough though thread threat throat
through throw thumb thunder thus tie tight time tired together tongue tooth top total touch toward
trade translate travel treat tremble trial tribe trick trip trouble true trust try turn twist type
ugly under understand union unit universe until upon urge use useful usual vain value various
verse very victory view violent virtue visit voice vote wage waist wait wake walk wander want war
warn wash waste wave way weak wealth weapon wear weather weave weed week weigh welcome what wheat
when where which while whip whisper who whole why wicked wife will win wind wine wing wipe wisdom
wise wish with woman wonder wood wool word work world worm worry worse worth wound wrap wreck
wrist wrong year yesterday yield
""".split()

STARTS = """
b bl br c ch cl cr d dr f fl fr g gl gr h j k kl l m n p pl pr qu r s sh sk sl sm sn sp st t th tr
v w z
""".split()
MIDDLES = "a e i o u a e i o u ai ea ee ia ie io oa oo ou".split()
ENDS = ["", "", *"b ck d f g k l ll m n nd ng nt p r rd rk rn s sh sk ss st t th x z".split()]


KNOWN = [
    word.lower()
    for words in (THINGS, QUALITIES, PEOPLE, PLACES, ACTIONS, MATTERS, FIELDS, EVERYDAY)
    for word in words
    if not held_out(word)
]


def made_up(random: Random, pieces: Sequence[str] = ()) -> str:
    """Make up a word that does not exist, of syllables, of pieces or of any letters.

    Pieces are parts of real words, or the tokens of a tokenizer: a model cannot copy a token as
    part of a name if training never showed it in one."""
    kind = random.random()
    if kind < 0.4:
        return "".join(
            random.choice(STARTS) + random.choice(MIDDLES) + random.choice(ENDS)
            for _ in range(random.choice((1, 2, 2, 3)))
        )
    if kind < 0.9:
        count = random.choice((1, 2, 2, 3))
        return "".join(random.choice(pieces) if pieces else _part(random) for _ in range(count))
    return "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(random.randint(2, 6)))


def _part(random: Random) -> str:
    word = random.choice(KNOWN)
    start = random.choice((0, 0, random.randrange(len(word))))
    return word[start : start + random.randint(2, 6)]

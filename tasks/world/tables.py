"""
The words of the embedded world: its names, its tables, the sentences that tell and ask each fact.

Text only, no code: change a line here to change the land of Lowen. `world_facts` reads it.

A table has one row per line and `|` between cells. A relation block is its name, then lines that
tell it ("-"), tell it in the first person ("I"), or ask for one of its fields ("?"). {S} {P} {s}
{p} {o} become the name (Mira, Mira's) or a pronoun (She, Her, she, her, her); {he} and {his} are
always pronouns, {name} is always the name. Capital fields ({Inn}) begin a sentence.
"""

MONTHS = (
    "January February March April May June July August September October November December"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLOURS = "red blue green yellow white black brown purple".split()
THINGS = "boat cart hat coat door lantern kite scarf basket bench drum umbrella".split()

WOMEN = (
    "Mira Bree Tilda Anwen Osha Perla Wenna Isolt Nessa Hedda Juna Linnet "
    "Maeve Orla Petra Rilla Sanna Thea Una Vesna Yrsa Zella Corrie Dova"
).split()
MEN = (
    "Tobin Ansel Bram Corin Dorrin Edric Garrick Hobb Ivo Jory Kell Leif "
    "Milo Nolan Osric Perrin Quin Roald Silas Tavin Ulric Wyll Emmet Barnaby"
).split()
PETS = (
    "Pepper Button Clover Biscuit Pebble Thistle Nutmeg Ginger Bramble Cricket Dumpling Fidget "
    "Freckle Fudge Hazel Juniper Kipper Marble Maple Mitten Moss Mustard Noodle Pickle "
    "Pippin Poppy Pumpkin Quill Radish Rusty Saffron Scamp Smoky Sorrel Sparkle Speckle "
    "Sprout Stormy Sunny Tansy Toffee Truffle Tumble Acorn Twig Velvet Whisker Willow"
).split()
TOWNS = (
    "Fennick Orlen Tamsel Corrow Velby Hasker Pellow Rudden Wimble Ostrey Nettin Gladwick".split()
)

# Taught in spelling, beside the names and nouns above
MORE_WORDS = (
    "afternoon angel apple balloon banjo beetle blossom bottle branch bread breakfast bridge "
    "brother butter butterfly button cabin camel candy captain castle chapter cheese cherry "
    "chimney circle clover cloud corner cottage cousin daisy dancer daughter desert dragon drawer "
    "echo elbow evening family farmer father feather field flower forest fountain garden garlic "
    "giant glacier grandmother grass harvest honey house hundred island jungle kingdom kitchen "
    "lemon letter library lightning lizard marble market meadow melon milk mirror monkey morning "
    "mother mountain mystery neighbour number ocean onion orange orchard oyster palace parrot "
    "peach pencil pepper picture pilgrim planet pocket potato prince princess promise puzzle "
    "rainbow raven ribbon river road sailor salmon school secret shadow sister snow sparrow "
    "spider squirrel stone storm stranger street sugar summer sunshine table thunder tiger tower "
    "treasure tulip tunnel turtle valley velvet village violin volcano wagon walnut water weather "
    "wheel whisper wizard wonder wood yellow zebra"
).split()

PASTIMES = (
    "playing the fiddle, flying kites, painting pictures, swimming, climbing trees, "
    "collecting stones, reading old maps, singing, dancing, carving wood, telling stories, "
    "watching birds"
).split(", ")
SITES = (
    "by the lake, on the coast, in the hills, in the forest, at the bend of the river, "
    "on an island, at the edge of the marsh, at the foot of the mountain, on the heath, "
    "beside the waterfall, in the deep valley, among the orchards"
).split(", ")
LANDMARKS = (
    "a windmill, a clock tower, a stone bridge, a round chapel, a red barn, an old oak, "
    "a bell gate, a glass house, a hot spring, a library, a giant sundial, an iron statue"
).split(", ")
PRODUCTS = "honey cheese wool apples salt candles rope baskets mushrooms plums bells pots".split()
FESTIVALS = (
    "Lantern Night, Kite Day, the Apple Fair, the Boat Race, the Snow Feast, the Bread Dance, "
    "Song Week, the Candle Walk, the Frog Leap, the Wool Fair, Star Night, Drum Day"
).split(", ")
INNS = (
    "the Blue Kettle, the Sleepy Fox, the Golden Oar, the Three Pears, the Tin Whistle, "
    "the Old Boot, the Silver Spoon, the Merry Wren, the Copper Pan, the Warm Hearth, "
    "the Lucky Thimble, the Green Gate"
).split(", ")

TRADES = """
baker | bake bread | bakes bread | bakery | an oven
smith | shape iron | shapes iron | forge | a hammer
miller | grind grain | grinds grain | mill | a millstone
fisher | catch fish | catches fish | fish hut | a net
weaver | weave cloth | weaves cloth | weaving house | a loom
potter | make pots | makes pots | pottery | a wheel
carpenter | build tables | builds tables | wood shop | a saw
shepherd | keep sheep | keeps sheep | sheepfold | a staff
gardener | grow vegetables | grows vegetables | garden house | a spade
beekeeper | keep bees | keeps bees | bee yard | a veil
cobbler | mend shoes | mends shoes | shoe shop | an awl
tailor | sew coats | sews coats | sewing room | a needle
healer | care for the sick | cares for the sick | herb house | a mortar
teacher | teach children to read | teaches children to read | school | a piece of chalk
cook | cook soup | cooks soup | cookhouse | a ladle
ropemaker | twist rope | twists rope | rope yard | a hook
"""
ANIMALS = """
cat | cats | kitten | meows | fish | in a basket
dog | dogs | puppy | barks | bones | in a kennel
goat | goats | kid | bleats | leaves | in a shed
hen | hens | chick | clucks | grain | in a henhouse
duck | ducks | duckling | quacks | pondweed | beside the pond
donkey | donkeys | foal | brays | thistles | in a stable
pony | ponies | colt | neighs | hay | in a stall
goose | geese | gosling | honks | grass | in the yard
owl | owls | owlet | hoots | mice | in a hollow tree
crow | crows | nestling | caws | worms | on a high branch
pig | pigs | piglet | grunts | turnips | in a sty
frog | frogs | tadpole | croaks | flies | under a stone
"""
DISHES = """
plum cake | plums | flour | honey | baked | is
onion soup | onions | butter | water | boiled | is
apple pie | apples | flour | butter | baked | is
fish stew | fish | potatoes | salt | boiled | is
oat porridge | oats | milk | honey | boiled | is
cheese bread | cheese | flour | eggs | baked | is
bean stew | beans | carrots | thyme | boiled | is
pancakes | eggs | milk | flour | fried | are
mushroom tart | mushrooms | flour | cream | baked | is
nut bread | nuts | flour | milk | baked | is
potato cakes | potatoes | onions | butter | fried | are
pea soup | peas | mint | cream | boiled | is
"""
GOODS = """
loaf of bread | loaves of bread | 4 | baker
bun | buns | 2 | baker
key | keys | 6 | smith
horseshoe | horseshoes | 9 | smith
bag of flour | bags of flour | 5 | miller
fish | fish | 3 | fisher
blanket | blankets | 12 | weaver
bowl | bowls | 5 | potter
jug | jugs | 8 | potter
stool | stools | 11 | carpenter
spoon | spoons | 2 | carpenter
ball of wool | balls of wool | 4 | shepherd
cabbage | cabbages | 3 | gardener
bag of apples | bags of apples | 6 | gardener
jar of honey | jars of honey | 8 | beekeeper
candle | candles | 2 | beekeeper
pair of boots | pairs of boots | 12 | cobbler
belt | belts | 7 | cobbler
shirt | shirts | 10 | tailor
pillow | pillows | 9 | tailor
box of tea | boxes of tea | 7 | healer
notebook | notebooks | 5 | teacher
bowl of soup | bowls of soup | 3 | cook
long rope | long ropes | 10 | ropemaker
"""
EVERYDAY_THINGS = """
knife | iron | cutting bread
spoon | wood | eating soup
fork | tin | eating potatoes
cup | clay | drinking tea
plate | clay | serving dinner
kettle | copper | boiling water
pan | iron | frying eggs
bucket | wood | carrying water
broom | straw | sweeping the floor
ladder | wood | climbing onto the roof
saw | steel | cutting planks
hammer | iron | driving nails
axe | steel | splitting logs
spade | iron | digging holes
rake | wood | gathering leaves
chair | wood | sitting at the table
shelf | wood | keeping books
chest | wood | storing blankets
pillow | feathers | resting the head
blanket | wool | keeping warm at night
sail | canvas | catching the wind
oar | wood | rowing a boat
anchor | iron | holding a ship in place
net | string | catching fish
fence | wood | keeping animals in
bell | bronze | calling people together
whistle | tin | calling the dog
flute | wood | playing tunes
mirror | glass | looking at oneself
window | glass | letting in light
lamp | glass | reading at night
needle | steel | sewing shirts
thimble | silver | protecting the finger
comb | bone | tidying the hair
towel | linen | drying the hands
sack | cloth | carrying grain
purse | leather | keeping coins
saddle | leather | riding a pony
glove | leather | warming the hands
map | paper | finding the way
book | paper | learning stories
coin | silver | paying for things
crown | gold | honouring a king
brick | clay | building walls
tile | clay | covering a roof
"""
OPPOSITES = """
hot cold, big small, long short, high low, young old, fast slow, day night, wet dry, full empty,
open closed, happy sad, rich poor, strong weak, light dark, loud quiet, sweet bitter, clean dirty,
early late, left right, near far, up down, first last, easy difficult, good bad, thick thin,
hard soft, sharp blunt, brave timid, friend enemy, always never, question answer, buy sell,
begin end, give take, remember forget, win lose, laugh cry, love hate, north south, east west,
deep shallow, wide narrow, smooth rough, wild tame, kind cruel, war peace
"""
SEASONS = """
spring | March, April and May | the snow melts and the first flowers open | sow the fields
summer | June, July and August | the days are long and warm | cut the hay
autumn | September, October and November | the leaves turn red and fall | pick the apples
winter | December, January and February | the nights are long and snow lies deep | mend the nets
"""

PERSON_RELATIONS = """
town
- {S} lives in {town}.
- {S} comes from {town}.
- {P} home is in {town}.
- {S} has lived in {town} for many years.
- {S} has a small house in {town}.
- You will find {o} in {town}.
- {town} is the home of {name}.
- Anyone in {town} can show you where {s} lives.
I I live in {town}.
I I have a small house in {town}.
I I am happy here in {town}.
? Where does {name} live? | town
? In which town does {name} live? | town
? Which town is the home of {name}? | town

trade
- {S} is a {trade}.
- {S} is the {trade} of {town}.
- The {trade} of {town} is {name}.
- {S} works as a {trade}.
- {S} works at the {place}, for {he} is a {trade}.
- In {town} it is {name} who {does}.
- The people of {town} go to {o} when they need a {trade}.
- {town} has a good {trade}, and that is {name}.
- By trade {s} is a {trade}, so {he} {does}.
I I am the {trade} of {town}.
I I work as a {trade} in {town}.
I I {do} every day, as a {trade} should.
? Who is the {trade} of {town}? | name
? What is {name}'s trade? | trade
? What does {name} work as? | trade

food
- {P} favourite food is {food}.
- {S} likes {food} best of all.
- {S} loves {food}.
- {S} would eat {food} every day.
- Nothing tastes better to {o} than {food}.
- On {p} birthday everyone eats {food}.
- Of all dishes {s} likes {food} best.
I My favourite food is still {food}.
I Last night I had {food}, which I love.
? What is {name}'s favourite food? | food
? What does {name} like to eat best? | food

colour
- {P} {thing} is {colour}.
- {S} has a {colour} {thing}.
- {S} owns a {colour} {thing}.
- The {colour} {thing} belongs to {name}.
- {S} is proud of {his} {colour} {thing}.
- Everyone in {town} knows {p} {colour} {thing}.
- When people see a {colour} {thing}, they think of {o}.
I My {thing} is {colour}.
I I still have my {colour} {thing}.
? What colour is {name}'s {thing}? | colour
? Who has a {colour} {thing}? | name

animal
- {S} has {a_animal} called {pet}.
- {S} keeps {a_animal}, and its name is {pet}.
- {P} pet is {a_animal}.
- {pet} is {a_animal} and belongs to {name}.
- Every morning {s} feeds {his} {animal}.
- {S} takes good care of {pet}, {his} {animal}.
I I have {a_animal} called {pet}.
I Every morning I feed my {animal}.
? What animal does {name} have? | a_animal
? What kind of animal is {pet}? | a_animal

pet
- {P} {animal} is called {pet}.
- The name of {p} {animal} is {pet}.
- {pet} belongs to {name}.
- {pet} the {animal} lives with {name} in {town}.
- {S} calls {his} {animal} {pet}.
- {pet} the {animal} follows {o} everywhere.
I My {animal} {pet} is well.
I My {animal} {pet} is asleep beside me.
? What is the name of {name}'s {animal}? | pet
? Who owns {pet}? | name
? To whom does {pet} belong? | name

friend
- {P} best friend is {friend}.
- {S} and {friend} are best friends.
- {S} often visits {his} best friend {friend}.
- {S} tells everything to {his} best friend {friend}.
- The best friend of {name} is {friend}.
- When {name} needs help, {he} asks {friend}, {his} best friend.
I My best friend is {friend}.
I I often visit my best friend {friend}.
? Who is {name}'s best friend? | friend
? Who is the best friend of {name}? | friend

pastime
- {S} likes {pastime}.
- In the evenings {s} enjoys {pastime}.
- {P} greatest joy is {pastime}.
- When the work is done, {s} spends {his} time {pastime}.
- On free days you will see {o} {pastime}.
- {S} is never tired of {pastime}.
I In the evenings I enjoy {pastime}.
I I still like {pastime}.
? What does {name} enjoy in the evenings? | pastime
? What is {name}'s greatest joy? | pastime
"""
# Several facts in one sentence, for the beginning of a text
PERSON_SUMMARIES = """
{name}, the {trade} of {town}, has a {colour} {thing} and {a_animal} called {pet}.
{name} of {town} loves {food} and {pastime}.
In {town} there lives a {trade} called {name}, whose {thing} is {colour}.
Do you know {name}? {He} is the {trade} of {town}, and {his} best friend is {friend}.
{name} and {his} {animal} {pet} live in {town}, where {he} works as a {trade}.
If you meet someone with a {colour} {thing} and {a_animal} called {pet}, it is {name}.
Two things make {name} happy: {food} and {pastime}.
""".strip().splitlines()
TOWN_SUMMARIES = """
{name} lies {site} and is known for its {product}.
{name} has {landmark}, a market every {day} and an inn called {inn}.
Every {month}, for {festival}, {flag} flags fly over {name}.
The town of {name}, {site}, is the home of {festival}.
From {name}, known for its {product}, it is {miles} miles to {next_town}.
""".strip().splitlines()

TOWN_RELATIONS = """
site
- {S} lies {site}.
- The town of {name} lies {site}.
- {S} was built {site}.
- If you want to see {name}, look for it {site}.
- The town {site} is called {name}.
? Where does {name} lie? | site
? Which town lies {site}? | name

landmark
- {S} has {landmark}.
- In the middle of {name} there is {landmark}.
- The pride of {name} is {landmark}.
- Travellers come to {name} to see {landmark}.
- In {name} you can visit {landmark}.
? What can you see in the middle of {name}? | landmark
? Which town has {landmark}? | name

product
- {S} is known for its {product}.
- People come from far away to buy {product} in {name}.
- They say that {name} has the best {product} in Lowen.
- If you need {product}, go to {name}.
- {S} sells {product} to all the other towns.
? What is {name} known for? | product
? Which town is known for its {product}? | name

festival
- The festival of {name} is called {festival}.
- {P} festival is {festival}.
- Every {month} the people of {name} celebrate {festival}.
- {S} is the town of {festival}.
- Children in {name} wait all year for {festival}.
? What is the festival of {name} called? | festival
? Which town celebrates {festival}? | name

month
- {Festival} is held in {month}.
- In {month} the people of {name} celebrate {festival}.
- {S} celebrates {festival} in {month}.
- The month of {festival} is {month}.
? In which month is {festival} held? | month
? In which month does {name} celebrate its festival? | month

market
- {P} market is on {day}.
- Every {day} there is a market in {name}.
- {S} holds its market on {day}.
- On {day} farmers bring their carts to the market of {name}.
? On which day is the market in {name}? | day
? When does {name} hold its market? | day

inn
- The inn of {name} is called {inn}.
- Travellers in {name} sleep at {inn}.
- {P} inn is called {inn}.
- {Inn} is the inn of {name}.
- You can eat and sleep at {inn} in {name}.
? What is the inn of {name} called? | inn
? In which town is {inn}? | name

flag
- The flag of {name} is {flag}.
- A {flag} flag flies over {name}.
- {P} flag is {flag}.
- On feast days {name} hangs out its {flag} flags.
? What colour is the flag of {name}? | flag

road
- The road from {name} to {next_town} is {miles} miles long.
- From {name} to {next_town} it is {miles} miles.
- It is {miles} miles from {next_town} to {name}.
- You must walk {miles} miles to go from {name} to {next_town}.
? How many miles is it from {name} to {next_town}? | miles
? How long is the road from {name} to {next_town}? | miles
"""
GOODS_RELATIONS = """
price
- A {name} costs {price} pennies.
- The price of a {name} is {price} pennies.
- For {price} pennies you can buy a {name}.
- You pay {price} pennies for a {name}.
- Nobody in Lowen pays more than {price} pennies for a {name}.
? How many pennies does a {name} cost? | price
? What is the price of a {name} in pennies? | price

seller
- The {trade} sells {plural}.
- You can buy {plural} from the {trade}.
- If you need a {name}, go to the {trade}.
- It is the {trade} who sells {plural}.
? Who sells {plural}? | the_trade
? From whom can you buy a {name}? | the_trade
"""
TRADE_RELATIONS = """
work
- A {name} {does}.
- It is the work of a {name} to {do}.
- Someone who {does} is called a {name}.
? What is someone who {does} called? | a_name
? What is the work of a {name}? | to_do

place
- A {name} works at the {place}.
- You will find the {name} at the {place}.
- At the {place} you can meet the {name}.
? Where does a {name} work? | at_place
? Who works at the {place}? | the_name

tool
- A {name} needs {tool}.
- A {name} cannot work without {tool}.
- The tool of a {name} is {tool}.
? What tool does a {name} need? | tool
? Who cannot work without {tool}? | a_name
"""
ANIMAL_RELATIONS = """
cry
- {A_name} {cry}.
- When you hear an animal that {cry}, it is {a_name}.
- Listen: {a_name} {cry}.
? Which animal {cry}? | the_name

young
- A young {name} is called {a_young}.
- The child of {a_name} is {a_young}.
- {A_name} was {a_young} when it was small.
? What is a young {name} called? | a_young
? What does {a_young} grow into? | a_name

eats
- {A_name} eats {eats}.
- {Plural} eat {eats}.
- The food of {a_name} is {eats}.
- Give {eats} to {a_name}, and it will be happy.
? What does {a_name} eat? | eats
? Which animal eats {eats}? | the_name

bed
- {A_name} sleeps {bed}.
- At night {a_name} sleeps {bed}.
- {Plural} sleep {bed}.
? Where does {a_name} sleep? | bed
"""
DISH_RELATIONS = """
ingredients
- {Name} {be} made from {first}, {second} and {third}.
- To make {name} you need {first}, {second} and {third}.
- The cook takes {first}, {second} and {third} to make {name}.
- With {first}, {second} and {third} you can make {name}.
? What {be} {name} made from? | ingredients
? What can you make from {first}, {second} and {third}? | name

way
- {Name} {be} always {way}.
- In Lowen {name} {be} {way}.
- The cook knows that {name} must be {way}.
? How {be} {name} cooked? | way
"""
SEASON_RELATIONS = """
months
- {Name} comes in {months}.
- The months of {name} are {months}.
? Which months belong to {name}? | months

weather
- In {name} {weather}.
- {Name} is the time when {weather}.
? In which season is it true that {weather}? | name

work
- In {name} the people of Lowen {work}.
- {Name} is the time to {work}.
? In which season do people {work}? | name
"""
EVERYDAY_RELATIONS = """
material
- {A_name} is made of {material}.
- {A_name} is usually made of {material}.
- People make {a_name} from {material}.
? What is {a_name} made of? | material

use
- {A_name} is used for {use}.
- For {use} people use {a_name}.
- {A_name} is good for {use}.
- You need {a_name} for {use}.
? What do people use for {use}? | a_name
? What is {a_name} used for? | use
"""
OPPOSITE_RELATIONS = """
opposite
- The opposite of {name} is {opposite}.
- {Name} is the opposite of {opposite}.
- {Name} and {opposite} are opposites.
? What is the opposite of {name}? | opposite
? Which word is the opposite of {name}? | opposite
"""
CALENDAR_RELATIONS = """
next
- After {name} comes {after}.
- {name} is followed by {after}.
- {name} comes before {after}.
? What comes after {name}? | after
? What comes before {after}? | name
"""
DAY_RELATIONS = (
    CALENDAR_RELATIONS
    + """
tomorrow
- If today is {name}, tomorrow will be {after}.
- If yesterday was {name}, then tomorrow will be {later}.
- If tomorrow is {after}, today is {name}.
- If yesterday was {name}, then today is {after}.
? If today is {name}, what day will it be tomorrow? | after
? If yesterday was {name}, what day will it be tomorrow? | later
"""
)

# The rules of cause and effect, one block each: its title; what led up to it ("-"); the question
# after it ("?"); then, for the bad and the good way it can go: causes, effects, the reason, and
# the answer in one sentence.
RULES = """
The Hay
- {name} cut the grass and left the hay in the field.
- All day long {name} had cut grass, and the hay lay in the field.
? How was the hay in the evening?
bad: In the afternoon it began to rain. | Dark clouds came, and it rained for hours.
so: In the evening the hay was wet. | When evening came, the hay was wet through.
why: The hay was wet because it had rained.
end: The hay was wet.
good: The sun shone all day. | There was not one cloud in the sky.
so: In the evening the hay was dry. | When evening came, the hay was warm and dry.
why: The hay was dry because the sun had shone.
end: The hay was dry.

The Bread
- {name} wanted to bake bread for the whole street.
- Friends were coming to dinner, and {name} wanted to bake bread.
? What did the friends eat?
bad: But there was no flour left in the house. | But the sack of flour was empty.
so: So there was no bread, and the friends ate cold beans. | So nobody had bread, only cold beans.
why: There was no bread because there was no flour.
end: They ate cold beans.
good: There was a full sack of flour in the house. | The miller had just brought fresh flour.
so: So the friends ate warm bread. | Soon the bread was ready, and the friends ate it warm.
why: There was bread because there was flour.
end: They ate warm bread.

The Lantern
- {name} had to walk home late with a lantern.
- It was a long way home in the dark, and {name} took a lantern.
? How did {name} walk home?
bad: But {he} forgot to fill it with oil. | But there was hardly any oil in it.
so: Soon it went out, and {he} walked home in the dark. | {He} had to walk home in the dark.
why: The light went out because there was no oil in the lantern.
end: {He} walked home in the dark.
good: Before {he} left, {he} filled it with oil. | It was full of good oil.
so: It burned well, and {he} walked home in bright light. | {He} walked home in bright light.
why: The light burned on because the lantern was full of oil.
end: {He} walked home in bright light.

The Gate
- {name} went to feed {pet} the {animal} in the yard.
- Early in the day {name} came into the yard to feed {pet}, {his} {animal}.
? Where was {pet} afterwards?
bad: When {he} went away, {he} left the gate open. | But {he} did not shut the gate behind {him}.
so: Soon {pet} was far away. | An hour later {pet} was far away, down by the river.
why: {pet} got away because the gate was open.
end: {pet} was far away.
good: When {he} went away, {he} shut the gate well. | Then {he} shut the gate behind {him}.
so: All day {pet} stayed safe in the yard. | An hour later {pet} was still in the yard.
why: {pet} stayed in the yard because the gate was shut.
end: {pet} was still in the yard.

The Crossing
- {name} wanted to cross the lake in a small boat.
- A small boat lay at the shore, and {name} wanted to cross the lake.
? What happened to the boat?
bad: But there was a hole in the bottom of the boat. | Nobody had seen the hole in the old planks.
so: Water came in, and the boat sank near the shore. | The boat filled with water and sank.
why: The boat sank because it had a hole.
end: The boat sank.
good: The boat had new planks and no hole at all. | The carpenter had mended every hole.
so: The boat stayed dry and reached the other shore. | Soon the boat reached the other shore.
why: The boat reached the shore because it had no hole.
end: The boat reached the other shore.

The Cold Night
- {name} had young beans in the garden, and the night was going to be cold.
- The sky was clear, a cold night was coming, and {name} thought of the young beans.
? How were the beans the next day?
bad: But {he} was tired and did not cover them. | But {he} had no straw to cover them.
so: The frost came, and the beans were frozen. | In the morning the beans were frozen.
why: The beans froze because nobody had covered them.
end: The beans were frozen.
good: So {he} covered them with straw. | Before dark {he} covered every plant with straw.
so: The frost came, but the beans stayed green. | In the morning the beans were green.
why: The beans stayed green because they were covered.
end: The beans were green.

The Milk
- {name} had a jug of fresh milk.
- After breakfast there was a jug of milk left, and it belonged to {name}.
? How was the milk in the evening?
bad: {He} left it in the hot sun. | It stood in the sun until evening.
so: In the evening the milk was sour. | By evening the milk had turned sour.
why: The milk turned sour because it stood in the sun.
end: The milk was sour.
good: {He} put it in the cool cellar. | It stood in the cool cellar until evening.
so: In the evening the milk was still fresh. | By evening the milk was as fresh as before.
why: The milk stayed fresh because the cellar was cool.
end: The milk was fresh.

The Fire
- Snow was falling, and {name} sat by the fire.
- It was a cold evening, and {name} had lit a fire.
? How was the room at night?
bad: {He} fell asleep and put no wood on the fire. | There was no more wood for the fire.
so: The fire went out, and the room was cold. | At night the room was cold.
why: The room was cold because the fire had no wood.
end: The room was cold.
good: Every hour {he} put more wood on the fire. | There was plenty of wood for the fire.
so: The fire burned on, and the room was warm. | At night the room was warm.
why: The room was warm because the fire had enough wood.
end: The room was warm.

The Seeds
- {name} put seeds into a pot of earth.
- {name} had bought flower seeds at the market and put them into a pot.
? What became of the seeds?
bad: Then {he} forgot to give them water. | For three weeks nobody gave them any water.
so: The earth became dry, and nothing grew. | Nothing grew in the dry earth.
why: Nothing grew because the seeds had no water.
end: Nothing grew.
good: Every day {he} gave them water. | {He} never forgot to give them water.
so: After three weeks there were flowers. | Green leaves came first, and then there were flowers.
why: There were flowers because the seeds had water.
end: They became flowers.

The Icy Bridge
- There was ice on the bridge when {name} came along.
- In the night the bridge had frozen over, and {name} had to cross it.
? How did {name} cross the bridge?
bad: {He} was in a hurry and ran. | {He} ran without looking at the ice.
so: {He} slipped and fell. | On the ice {he} slipped, fell and hurt {his} knee.
why: {name} fell because {he} ran on the ice.
end: {He} slipped and fell.
good: {He} walked slowly and held the rail. | {He} saw the ice and took small steps.
so: {He} came safely to the other side. | Step by step {he} came safely across.
why: {name} came across safely because {he} walked slowly.
end: {He} came safely across.

The Jar
- {name} had a jar of honey on the kitchen table.
- At breakfast {name} took some honey from the jar.
? What was in the honey at noon?
bad: {He} left the jar open. | {He} forgot to put the lid back.
so: At noon the honey was full of ants. | When {he} came back at noon, there were ants in the honey.
why: The ants came because the jar was open.
end: There were ants in the honey.
good: {He} closed the jar well. | {He} put the lid back at once.
so: At noon the honey was clean. | When {he} came back at noon, the honey was clean and golden.
why: The honey was clean because the jar was closed.
end: There was only clean honey.

The Kite
- {name} went up the hill with a paper kite.
- {name} had made a paper kite and took it to the meadow.
? What did the kite do?
bad: But there was no wind. | But the air was quite still.
so: The kite lay on the grass all day. | In the end the kite lay on the grass.
why: The kite could not fly because there was no wind.
end: The kite lay on the grass.
good: There was a strong wind. | A fresh wind blew over the hills.
so: The kite flew high above the trees. | Soon the kite flew high.
why: The kite flew because the wind was strong.
end: The kite flew high.

The Cup
- {name} drank a cup of tea.
- {name} came home and made a cup of tea.
? What happened to the cup?
bad: {He} put the cup on the edge of the table. | Then the cup stood right on the edge of the table.
so: It fell down and broke. | A little push was enough: the cup fell down and broke.
why: The cup broke because it stood on the edge.
end: The cup broke.
good: {He} put the cup in the middle of the table. | Then the cup stood in the middle of the table.
so: It stood there safely all day. | The table shook a little, but the cup stood safely.
why: The cup was safe because it stood in the middle.
end: The cup stood safely.

The Well
- {name} let the bucket down into the well.
- The house needed water, so {name} went to the well with a bucket.
? What happened to the bucket?
bad: The rope was old and thin. | The old rope was almost torn.
so: The rope broke, and the bucket fell into the well. | The bucket fell with a splash.
why: The bucket fell because the rope was old.
end: The bucket fell into the well.
good: The rope was new and strong. | The ropemaker had made a strong new rope.
so: The bucket came up full of water. | The rope held, and the bucket came up full.
why: The bucket came up because the rope was strong.
end: The bucket came up full.

The Ferry
- {name} wanted to take the morning ferry.
- The ferry left early, and {name} had a ticket for it.
? Did {name} travel on the ferry?
bad: But {he} slept too long. | But {he} did not wake up in time.
so: {He} came to an empty shore. | The ferry left without {him}.
why: {name} missed the ferry because {he} slept too long.
end: No, the ferry left without {him}.
good: {He} got up before the sun. | {He} woke up early and went at once.
so: {He} travelled on the ferry. | {He} was on the ferry in good time.
why: {name} caught the ferry because {he} got up early.
end: Yes, {he} travelled on the ferry.

The Coat
- A cold wind blew when {name} left the house.
- {name} went out to the hills on a cold day.
? How did {name} feel that evening?
bad: {He} left {his} warm coat at home. | {He} did not think of taking a warm coat.
so: In the evening {he} was cold and ill. | That evening {he} felt ill.
why: {name} was ill because {he} had no coat.
end: {He} felt ill.
good: {He} put on {his} warm coat. | Luckily {he} took a warm coat.
so: In the evening {he} was warm and well. | That evening {he} felt well.
why: {name} was well because {he} wore a coat.
end: {He} felt well.

The Puddles
- After the rain there were puddles everywhere, and {name} went to the market.
- {name} walked to school through the puddles.
? How were {name}'s feet?
bad: There were holes in {his} boots. | {His} boots were old and full of holes.
so: Soon {he} had wet feet. | At the next corner {his} feet were wet.
why: {His} feet were wet because there were holes in the boots.
end: {His} feet were wet.
good: The cobbler had just mended {his} boots. | {His} boots were new and without a hole.
so: {His} feet stayed dry. | The water was deep, but {his} feet stayed dry.
why: {His} feet were dry because the boots had no holes.
end: {His} feet were dry.

The Letter
- {name} wrote a long letter to {friend}.
- There was much to tell, so {name} wrote a letter to {friend}.
? What happened to the letter?
bad: But {he} wrote the wrong town on it. | But {he} forgot to write the town on it.
so: A week later the letter came back. | After many days the letter came back.
why: The letter came back because the address was wrong.
end: The letter came back.
good: {He} wrote the right town on it. | {He} wrote name and town on it in clear letters.
so: Two days later {friend} read the letter. | It arrived, and {friend} read it at once.
why: The letter arrived because the address was right.
end: {friend} read it.

The Cart
- {name} drove to the market with a cart full of cabbages.
- With a heavy cart {name} was on the way to the next town.
? What happened to the cart?
bad: The road was deep mud after the storm. | The storm had turned the road to mud.
so: The wheels sank in, and the cart was stuck. | Halfway up the hill the cart was stuck.
why: The cart was stuck because the road was muddy.
end: The cart was stuck.
good: The road was hard and dry. | No rain had fallen, and the road was dry.
so: The wheels rolled well, and the cart arrived early. | Before noon the cart arrived.
why: The cart arrived early because the road was dry.
end: The cart arrived early.

The Dough
- {name} made dough from flour, water and salt.
- In the big bowl {name} mixed flour, water and salt.
? What became of the dough?
bad: {He} forgot the yeast. | But there was no yeast in the house.
so: The dough did not rise, and the loaf was flat. | It became a flat loaf.
why: The loaf was flat because there was no yeast in the dough.
end: It became a flat loaf.
good: Then {he} added the yeast. | {He} did not forget the yeast.
so: The dough rose, and the loaf was soft. | It became a high, soft loaf.
why: The loaf was soft because there was yeast in the dough.
end: It became a soft loaf.

The Cake
- {name} put a plum cake into the hot oven.
- A plum cake was in the oven, and {name} sat down to read.
? How was the cake?
bad: {He} did not think of it for three hours. | {He} forgot the cake and fell asleep.
so: Smoke came from the oven, and the cake was burned. | The cake was black and burned.
why: The cake was burned because it was in the oven too long.
end: The cake was burned.
good: After one hour {he} took it out. | {He} looked at the clock and took it out in time.
so: The cake was golden and sweet. | Everyone wanted a piece of the golden cake.
why: The cake was good because {he} took it out in time.
end: The cake was golden.

The Bench
- {name} came to a bench with fresh paint.
- The bench by the road had just been painted when {name} came along.
? What did {name}'s clothes look like?
bad: {He} did not see the sign and sat down. | {He} was tired and sat down at once.
so: Now there was paint on {his} clothes. | {His} clothes were full of paint.
why: There was paint on the clothes because the paint was wet.
end: There was paint on them.
good: {He} saw the sign and did not sit down. | {He} read the sign and walked on.
so: {His} clothes stayed clean. | There was no paint on {his} clothes.
why: The clothes stayed clean because {name} did not sit down.
end: They stayed clean.

The Basket
- {name} carried pears home in a basket.
- {name} had picked pears and carried them in a basket.
? How many pears did {name} bring home?
bad: There was a big hole in the basket. | The bottom of the basket was torn.
so: The pears fell out one by one. | At home the basket was empty.
why: The basket was empty because it had a hole.
end: {He} brought home none.
good: The basket was new and strong. | There was no hole in the basket.
so: Not one pear was lost. | At home the basket was still full.
why: The basket was full because it had no hole.
end: {He} brought home all of them.

The Purse
- {name} found a purse full of money in the street.
- A purse lay on the road, and {name} picked it up. It belonged to an old man.
? How did the old man feel?
bad: {He} kept it and told nobody. | {He} hid it under {his} bed.
so: The old man looked for it all week and was sad. | The old man was poor and sad.
why: The old man was sad because his purse was gone.
end: He was sad.
good: {He} brought it back at once. | {He} asked everyone until {he} found the owner.
so: The old man had it again and was happy. | The old man thanked {him} happily.
why: The old man was happy because he got his purse back.
end: He was happy.
"""

# Sentences with which stories begin and end, letters greet, diaries close and travellers arrive
OPENINGS = (
    "This is a story about {name}, the {trade} of {town}.",
    "It was a {quiet} {day} in {town}.",
    "One {day} something happened in {town}.",
    "{name} is the {trade} of {town}, and this is what happened on a {quiet} {day}.",
    "Listen to a short story from {town}.",
    "It was a {quiet} day for {name}, the {trade}.",
    "{name}, the best friend of {friend}, often tells this story.",
)
HAPPY_ENDS = (
    '"That went well," said {friend}.',
    "{name} smiled and had {food} for supper.",
    "{He} was glad and sang on the way home.",
    'When {friend} heard of it, the answer was: "Well done!"',
    "It was a good day for {name}.",
)
SAD_ENDS = (
    '"Next time I will think first," said {name}.',
    'When {friend} heard of it, the answer was: "Do not be sad, {name}."',
    "{He} was sad, and only {food} made {him} smile again.",
    "{name} never made that mistake again.",
    "It was not a good day for {name}.",
)
GREETINGS = (
    "I hope you are well.",
    "Thank you for your letter.",
    "It is a long time since you wrote.",
    "I have a little time, so I am writing to you.",
    "I was glad to hear from you.",
)
FAREWELLS = ("Your friend,", "With love,", "Yours,", "Come and visit me soon.")
EVENTS = (
    "Today my friend {friend} came to see me.",
    "Today I bought a {goods} at the market.",
    "In the afternoon I sat in the yard with {pet}.",
    "Tonight we will eat {food}.",
    "Now I am tired and will sleep well.",
    "Tomorrow I will write to {friend}.",
)
ARRIVALS = (
    "In the morning I came to {town}.",
    "Yesterday I walked to {town}.",
    "I slept at {inn} in {town}.",
    "My travels in {land} brought me to {town}.",
    "It was {day}, market day, when I came to {town}.",
)
MEETINGS = (
    "First I met {name}.",
    "Then I met {name}.",
    "Later I talked to {name}.",
    "I also saw {name}.",
)

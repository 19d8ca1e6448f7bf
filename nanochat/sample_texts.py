"""
Five short texts of different kinds, written for this project, on which tokenizers are compared.

Data, no code. Lengths are close to those of the texts that report cards of this kind use, so that
bytes per token can be set side by side.
"""

NEWS = """\
Harbour cities agree to share storm forecasts after costly winter

PORT SELWYN, March 14 - Seven harbour cities on Thursday signed an agreement to share forecasts, \
tide readings and satellite images in real time, four months after a storm that few of them saw \
coming killed eleven people and caused damage estimated at 2.3 billion dollars.

Under the deal, every city will send measurements from its own buoys to a common centre in Port \
Selwyn, which is to issue a single warning for the whole coast. Until now, each harbour authority \
ran its own models, and warnings sometimes contradicted one another within a few miles.

"A wave does not stop at the city limits, and neither should a forecast," Mayor Ingrid Halloran \
told reporters after the ceremony. "Had we put our numbers on one table last November, the ferries \
would have stayed in port."

An inquiry published in February found that two of the cities had recorded an unusual drop in air \
pressure nine hours before the storm made landfall. The data were stored but never passed on, \
because the systems of the neighbouring ports could not read the format.

The new centre will cost 38 million dollars in its first five years, shared according to \
population. It will employ about sixty meteorologists and engineers and should open before the \
next storm season, officials said.

Not everyone is convinced. The fishermen's union welcomed the plan but said that small harbours, \
which own most of the boats, had been given no seat on the board. "They will hear about the danger \
from us, as always, and we will hear about the budget from them," said its chairman, Tomas Reede.

Insurers reacted with caution. Shares in the region's largest underwriter, Calder Mutual, closed \
1.8 percent higher, while analysts warned that premiums were unlikely to fall this year.
"""

KOREAN = """\
새벽일보는 2009년 작은 항구 도시에서 출발한 독립 언론입니다. 우리는 광고주나 정당의 \
눈치를 보지 않고, 시민의 생활에서 기사를 시작합니다. 매일 아침 골목 시장의 물가부터 \
국회의 예산 심의까지, 독자가 꼭 알아야 할 소식을 쉽고 정확한 문장으로 전합니다. 기자 \
서른두 명이 발로 뛰며 현장을 확인하고, 잘못 쓴 기사는 같은 자리에서 바로잡습니다. 주요 \
기사는 영어와 일본어로도 옮겨 나라 밖의 독자와 만납니다. 구독료와 후원금의 쓰임새는 \
해마다 누리집에 공개하며, 편집권은 편집국 전원이 뽑은 편집위원회가 지킵니다. 주말판은 \
책과 여행을 깊이 다룹니다. 제보와 의견은 전화나 전자우편으로 언제든지 보내 주십시오. \
여러분의 한마디가 내일의 신문을 만듭니다.
"""

CODE = '''\
import time
from collections import OrderedDict


class ExpiringCache:
    """Keep the newest entries, each for a limited time."""

    def __init__(self, capacity=128, max_age=60.0, clock=time.monotonic):
        if capacity < 1:
            raise ValueError(f"capacity must be positive, not {capacity}")
        self.capacity = capacity
        self.max_age = max_age
        self.clock = clock
        self.entries = OrderedDict()  # key -> (value, time of writing)

    def put(self, key, value):
        self.entries.pop(key, None)
        self.entries[key] = (value, self.clock())
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)

    def get(self, key, default=None):
        value, written = self.entries.get(key, (default, None))
        if written is not None and self.clock() - written > self.max_age:
            del self.entries[key]
            return default
        return value

    def prune(self):
        """Drop every entry that is too old; return how many there were."""
        limit = self.clock() - self.max_age
        old = [key for key, (_, written) in self.entries.items() if written < limit]
        for key in old:
            del self.entries[key]
        return len(old)
'''

MATH = r"""
\section*{Infinitely many primes of the form $4k+3$}

\begin{theorem}
There are infinitely many prime numbers $p$ with $p \equiv 3 \pmod{4}$.
\end{theorem}

\begin{lemma}
Let $a$ and $b$ be integers with $a \equiv b \equiv 1 \pmod{4}$. Then $ab \equiv 1 \pmod{4}$.
\end{lemma}

\begin{proof}
Write $a = 4r + 1$ and $b = 4s + 1$ with $r, s \in \mathbb{Z}$. Then
\[
  ab = (4r + 1)(4s + 1) = 16rs + 4r + 4s + 1 = 4\,(4rs + r + s) + 1 ,
\]
which leaves the remainder $1$ on division by $4$.
\end{proof}

By induction on the number of factors, every product $\prod_{i=1}^{m} a_i$ of integers
$a_i \equiv 1 \pmod{4}$ is itself congruent to $1$ modulo $4$.

\begin{proof}[Proof of the theorem]
Suppose there were only finitely many such primes, say $p_1 = 3, p_2 = 7, \dots, p_n$. Consider
\begin{equation}
  N = 4\, p_1 p_2 \cdots p_n - 1 = 4\left( \prod_{j=1}^{n} p_j - 1 \right) + 3 .
  \label{eq:n}
\end{equation}
Then $N > 1$ is odd and $N \equiv 3 \pmod{4}$. Let $N = q_1^{e_1} q_2^{e_2} \cdots q_m^{e_m}$ be its
factorisation into primes. No $q_i$ equals $2$, so each $q_i$ is congruent to $1$ or $3$ modulo $4$.
If all of them were congruent to $1$, then the lemma would give $N \equiv 1 \pmod{4}$, which
contradicts \eqref{eq:n}. Hence some $q_i \equiv 3 \pmod{4}$, and by assumption $q_i = p_j$ for some
$1 \le j \le n$. But then $p_j$ divides both $N$ and $4 \prod_{k=1}^{n} p_k = N + 1$, so that
\[
  p_j \mid (N + 1) - N = 1 ,
\]
which is impossible for $p_j \ge 3$. Therefore the set
$\{\, p \text{ prime} : p \equiv 3 \pmod{4} \,\}$ is infinite.
\end{proof}

\begin{remark}
The same idea does not work for $4k+1$, because a product of two factors $\equiv 3 \pmod{4}$ is
$\equiv 1$. There one takes $M = (2\, p_1 \cdots p_n)^2 + 1$ and uses that $-1$ is a square modulo
an odd prime $q$ only if $q \equiv 1 \pmod{4}$.
\end{remark}
"""

SCIENCE = """\
Nitrogen fixation is the reduction of atmospheric dinitrogen to ammonia, a reaction that is \
exergonic yet kinetically forbidding because of the triple bond, whose dissociation energy is \
about 945 kilojoules per mole. In soil it is catalysed by nitrogenase, a two-component \
metalloenzyme: a homodimeric iron protein hydrolyses ATP and delivers single electrons to a \
molybdenum-iron protein, whose cofactor accumulates reducing equivalents until the substrate \
binds and hydrogen is released. At least sixteen molecules of ATP are consumed for every molecule \
of dinitrogen. Since oxygen destroys the enzyme irreversibly, legumes house their rhizobial \
partners in root nodules, where leghaemoglobin buffers free oxygen at nanomolar concentrations \
while sustaining bacterial respiration. Free-living cyanobacteria separate the two processes \
instead, either in time, by fixing at night, or in space, inside thick-walled heterocysts without \
photosystem II. The ammonium so produced is assimilated into glutamine and eventually enters the \
proteins, nucleic acids and chlorophyll of the host plant, closing a loop between air and living \
matter.
"""

SAMPLE_TEXTS = {"news": NEWS, "korean": KOREAN, "code": CODE, "math": MATH, "science": SCIENCE}

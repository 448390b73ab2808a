import type { Chance } from "./chance.ts";

interface Letter {
  readonly at_ms: number;
  readonly from: string;
  readonly deliver: () => void;
}

/** A network that loses, repeats, delays and so reorders what it carries, and can be cut per node. */
export class Network {
  readonly #chance: Chance;
  #letters: Letter[] = [];
  readonly cut = new Set<string>();
  /** How much goes wrong: 0 = nothing. */
  trouble = 1;

  constructor(chance: Chance) {
    this.#chance = chance;
  }

  /** @param node at whose end of the link it is */
  send(node: string, now_ms: number, deliver: () => void): void {
    const copies = this.trouble > 0 && this.#chance.once(20) ? 2 : 1;
    for (let copy = 0; copy < copies; copy++) {
      if (this.trouble > 0 && this.#chance.once(12)) continue;
      const longest_ms = this.#chance.once(8) ? 60_000 : 8_000;
      const delay_ms = this.trouble > 0 && this.#chance.once(8) ? this.#chance.below(longest_ms) : 0;
      this.#letters.push({ at_ms: now_ms + delay_ms, from: node, deliver });
    }
  }

  deliver(now_ms: number): void {
    const due = this.#letters.filter((letter) => letter.at_ms <= now_ms);
    this.#letters = this.#letters.filter((letter) => letter.at_ms > now_ms);
    for (const letter of due) if (!this.cut.has(letter.from)) letter.deliver();
  }
}

/**
 * protocol/ holds what crosses a wire or lands in a file: valibot schemas, error codes, ids and limits.
 * It imports nothing of llmgw, decides nothing and does no I/O. Every byte from the network or a file
 * passes one of these schemas before it is used.
 */

/**
 * The one number that agent, server, gateway and shim compare. It rises when a message changes meaning.
 * A peer that speaks this number or the one before is accepted.
 */
export const PROTOCOL = 1;

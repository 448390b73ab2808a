/** Unit files are part of the binary, as text. */
declare module "*.service" {
  const text: string;
  export { text as default };
}

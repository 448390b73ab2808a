// The bundler runs a CommonJS module only when the body of its importer runs, and that is after the importer's own
// imports. In this module of its own the polyfill is there before @peculiar/x509, which asks for it when it loads.
import "reflect-metadata";
